// What the user sets, kept in this browser as it was typed. The form in index.html says what is valid.

import { keep, recall } from "./storage.js";

const KEY = "mosaic.settings";

export class Settings {
  constructor(form) {
    this.form = form;
    for (const [name, value] of Object.entries(recall("localStorage", KEY, {}))) {
      if (form.elements[name]) form.elements[name].value = value;
    }
    form.addEventListener("input", () => this.#keep());
    form.addEventListener("reset", () => setTimeout(() => this.#keep())); // the event comes before the fields are empty
  }

  get system() {
    return this.form.elements.system.value.trim().toWellFormed();
  }

  /** What is set and valid, beside the system prompt: numbers, and "on" or "off" for thinking. */
  get values() {
    const thinking = this.form.elements.thinking.value;
    const values = thinking ? { thinking } : {};
    for (const field of this.form.querySelectorAll("input[type=number]")) {
      if (field.value && field.validity.valid) values[field.name] = field.valueAsNumber;
    }
    return values;
  }

  /** The same for the body of a request. */
  get parameters() {
    const { thinking, ...numbers } = this.values;
    return thinking ? { ...numbers, chat_template_kwargs: { enable_thinking: thinking === "on" } } : numbers;
  }

  #keep() {
    keep("localStorage", KEY, Object.fromEntries(new FormData(this.form)));
  }
}
