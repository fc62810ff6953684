// Text fields for messages.

import { button, make } from "./dom.js";

/** Enter alone. While an input method composes a character, Enter belongs to it; Safari tells by the code 229 only. */
export function isEnter({ key, shiftKey, isComposing, keyCode }) {
  return key === "Enter" && !shiftKey && !isComposing && keyCode !== 229;
}

/** Make a field as high as its text (up to what the style sheet allows). */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

/** A form in the place of a message, once it is in the page. */
export function editor(content, done, cancel) {
  const area = make("textarea", { value: content, dir: "auto", ariaLabel: "Edit the message" });
  const send = () => area.value.trim() && done(area.value.trim());
  area.addEventListener("input", () => fit(area));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (!isEnter(event)) return;
    event.preventDefault();
    send();
  });
  requestAnimationFrame(() => {
    fit(area);
    area.focus();
  });
  const tools = [button("Cancel", cancel), button("Send", send, { className: "main" })];
  return make("div", { className: "editor" }, area, make("div", { className: "tools" }, ...tools));
}
