// How messages look on the page.

import { button, copyButton, make } from "./dom.js";
import { editor } from "./editor.js";
import { seconds, summary, whole } from "./figures.js";
import { Markdown } from "./markdown.js";
import { follow } from "./scroll.js";

/** What the user said, as it was typed. `edited` is called with another text for it. */
export function userTurn(message, edited) {
  const article = make("article", { className: "turn user", ariaLabel: "You" });
  const text = make("div", { className: "text", dir: "auto", textContent: message.content });
  const edit = button("Edit", () => article.replaceChildren(editor(message.content, edited, cancel)));
  const tools = make("div", { className: "tools" }, copyButton(() => message.content), edit);
  function cancel() {
    article.replaceChildren(text, tools);
    edit.focus();
  }
  article.append(text, tools);
  return article;
}

/** An answer, while it is written and after. `again` is called when another one is wanted in its place. */
export class AnswerTurn {
  constructor(message, again) {
    this.message = message;
    this.again = again;
    this.begun = performance.now();
    this.pending = { reasoning: "", content: "" }; // has come since the last frame
    this.frame = null;
    this.reasoning = null; // where it goes, once there is any
    const text = make("div", { className: "text markdown" });
    this.content = new Markdown(text);
    this.status = make("p", { className: "status" });
    this.tools = make("div", { className: "tools" });
    this.node = make("article", { className: "turn answer", ariaLabel: "Answer" }, text, this.status, this.tools);
  }

  /** The answer is being waited for. */
  wait() {
    this.timer = setInterval(() => this.#tell(), 1000);
    this.#tell();
  }

  /** More of it has come. It is drawn with the next frame, however much of it comes until then. */
  write(reasoning, content) {
    this.pending.reasoning += reasoning;
    this.pending.content += content;
    this.frame ??= requestAnimationFrame(() => follow(() => this.#draw()));
  }

  /** No more will come. */
  finish() {
    clearInterval(this.timer);
    cancelAnimationFrame(this.frame);
    follow(() => {
      this.#draw();
      this.content.finish();
      this.reasoning?.finish();
      this.#tell();
      if (this.message.content) this.tools.append(copyButton(() => this.message.content));
      if (this.message.problem) this.tools.before(this.#problem());
      else this.tools.append(button("Regenerate", this.again, { className: "again" }));
    });
  }

  #draw() {
    this.frame = null;
    const { reasoning, content } = this.pending;
    this.pending = { reasoning: "", content: "" };
    if (reasoning) {
      this.reasoning ??= this.#openReasoning();
      this.reasoning.append(reasoning);
    }
    if (content) this.content.append(content);
    if (reasoning || content) this.#tell();
  }

  #openReasoning() {
    const text = make("div", { className: "markdown" });
    this.thinking = make("summary");
    this.node.prepend(make("details", { className: "reasoning" }, this.thinking, text));
    return new Markdown(text);
  }

  /** How far it is. */
  #tell() {
    const { end, content, figures } = this.message;
    const passed = (performance.now() - this.begun) / 1000;
    const thinks = end === null && !content;
    if (this.thinking) {
      this.thinking.classList.toggle("going", thinks);
      const since = whole(passed - figures.first);
      this.thinking.textContent = thinks ? `Thinking… ${since}` : `Thought for ${seconds(figures.thought)}`;
    }
    if (end !== null) this.status.textContent = summary(this.message);
    else if (figures.first === undefined) this.status.textContent = `Reading the prompt… ${whole(passed)}`;
    else this.status.textContent = this.thinking && thinks ? "" : "Writing…";
  }

  #problem() {
    const text = make("p", { textContent: this.message.problem });
    return make("div", { className: "problem", role: "alert" }, text, button("Try again", this.again));
  }
}
