// Small helpers for building the page. Text always goes in as text: nothing here, or anywhere, parses HTML.

/** An element with properties set and children (nodes or strings) in it. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A button that does something. */
export function button(label, onclick, properties = {}) {
  return make("button", { type: "button", textContent: label, onclick, ...properties });
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(text, label = "Copy") {
  return button(label, async ({ currentTarget: self }) => {
    self.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (self.textContent = label), 1500);
  });
}

/** Whether it is in the clipboard now. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // not https and not localhost: browsers then have no clipboard object
  }
}

function copyBySelection(text) {
  const area = make("textarea", { value: text, className: "off-screen", readOnly: true });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
