// The messages, as the API has them, and what is known beside them (how an answer ended, its figures). Kept while the
// tab is open, so that a reload loses nothing; not longer, so that tabs do not overwrite each other.

import { keep, recall } from "./storage.js";

const KEY = "mosaic.conversation";

export class Conversation {
  constructor() {
    this.messages = stored();
  }

  ask(content) {
    this.messages.push({ role: "user", content: content.toWellFormed() });
  }

  /** A message for an answer to be written into. `end`: why there will be no more of it; null as long as there may. */
  beginAnswer() {
    const message = { role: "assistant", content: "", reasoning_content: "", end: null, problem: null, figures: {} };
    this.messages.push(message);
    return message;
  }

  /** Forget this message and all after it. */
  cut(message) {
    this.messages.splice(this.messages.indexOf(message));
  }

  keep() {
    keep("sessionStorage", KEY, this.messages);
  }

  /** For a request. An answer of which nothing came is left out. */
  history(system) {
    const said = this.messages.filter(({ role, content, reasoning_content }) => {
      return role === "user" || content || reasoning_content;
    });
    return [...(system ? [{ role: "system", content: system }] : []), ...said.map(plain)];
  }
}

/** A message without what only this page knows. */
function plain({ role, content, reasoning_content }) {
  return reasoning_content ? { role, content, reasoning_content } : { role, content };
}

function stored() {
  const messages = recall("sessionStorage", KEY, []);
  for (const message of messages) {
    if (message.end === null) message.end = "left"; // the page went away while it was being written
  }
  return messages;
}
