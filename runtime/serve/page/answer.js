// One answer: asked for, written into its message as it comes, with its figures.

import { chat } from "./api.js";

/** Fills the message; `changed` is called with what is new. Whatever goes wrong becomes the message's end. */
export async function answer(body, message, signal, changed) {
  const clock = new Clock();
  try {
    for await (const chunk of chat(body, signal)) read(chunk, message, clock, changed);
    message.end ??= "stop";
  } catch (error) {
    message.end = error.name === "AbortError" ? "stopped" : "failed";
    if (message.end === "failed") message.problem = error.message;
    return message.end === "failed" ? error : null;
  } finally {
    clock.fill(message.figures);
  }
  return null;
}

function read({ choices, usage }, message, clock, changed) {
  if (usage) {
    message.figures.prompt = usage.prompt_tokens;
    message.figures.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    message.figures.completion = usage.completion_tokens;
  }
  const [choice] = choices ?? [];
  if (!choice) return;
  const { content, reasoning_content: reasoning } = choice.delta ?? {};
  if (content || reasoning) {
    clock.tick(Boolean(content));
    message.content += content ?? "";
    message.reasoning_content += reasoning ?? "";
    clock.fill(message.figures);
    changed(reasoning ?? "", content ?? "");
  }
  message.end ??= choice.finish_reason ?? null;
}

/** When things came, in seconds since the question. */
class Clock {
  constructor() {
    this.start = performance.now();
  }

  tick(content) {
    const now = (performance.now() - this.start) / 1000;
    this.first ??= now;
    this.last = now;
    if (content) this.told ??= now;
  }

  /** `first`: to the first token; from it `thought`: to the first word of the answer; `writing`: to the last token. */
  fill(figures) {
    if (this.first === undefined) return;
    figures.first = this.first;
    figures.thought = (this.told ?? this.last) - this.first;
    figures.writing = this.last - this.first;
  }
}
