// The blocks of markdown that hold text. Each takes whole lines by `add`, and shows the beginning of one by `preview`;
// the same line, longer, is previewed or added next. What is shown in the end does not depend on the previews.

import { copyButton, make } from "./dom.js";
import { inline } from "./inline.js";

const PIECE = 4000; // characters of a paragraph that are read together, and drawn again when more comes
const DELIMITER_ROW = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Text. A very long one is read in pieces, so that not all of it is drawn again with every word. */
export class Paragraph {
  constructor() {
    this.node = make("p");
    this.text = "";
    this.start = 0; // of the piece that is still being written
    this.#next();
  }

  add(line) {
    this.text = this.#with(line);
    this.#draw(this.text, this.text.length);
  }

  preview(line) {
    const text = this.#with(line);
    this.#draw(text, line.length > PIECE ? text.length : this.text.length);
  }

  /** Whether a table begins here: this is its head, and the line says so. */
  isHead(line) {
    const one = this.text.length < PIECE && this.text.includes("|") && !this.text.includes("\n");
    return one && line.length < PIECE && DELIMITER_ROW.test(line);
  }

  #with(line) {
    return (this.text && this.text + "\n") + line.trimStart();
  }

  /** `sure`: how much of the text will stay. Where pieces end depends on the text alone, not on when it came. */
  #draw(text, sure) {
    while (text.length - this.start > PIECE) {
      const end = pieceEnd(text, this.start);
      if (end > sure) break;
      this.live.replaceChildren(inline(text.slice(this.start, end)));
      this.start = end;
      this.#next();
    }
    this.live.replaceChildren(inline(text.slice(this.start)));
  }

  #next() {
    this.live = make("span");
    this.node.append(this.live);
  }
}

/** After a space if there is one, and never inside a character. */
function pieceEnd(text, start) {
  const space = text.slice(start, start + PIECE).search(/\s\S*$/);
  if (space > 0) return start + space + 1;
  return text.codePointAt(start + PIECE - 1) > 0xffff ? start + PIECE - 1 : start + PIECE;
}

/** Level 1 of an answer comes below the page's own headings. */
export class Heading {
  constructor(level) {
    this.node = make(`h${Math.min(level + 2, 6)}`);
  }

  add(line) {
    this.node.replaceChildren(inline(line.trim().replace(/^#+\s*|(?<!\s)\s+#+$/g, "")));
  }

  preview(line) {
    this.add(line);
  }
}

export class Rule {
  node = make("hr");
  add() {}
  preview() {}
}

/** Code, to its closing fence or the end. Only ever appended to. */
export class Fence {
  constructor(indent, mark, language) {
    this.indent = new RegExp(`^[ \\t]{0,${indent}}`);
    this.end = new RegExp(`^\\s*${mark[0]}{${mark.length},}\\s*$`);
    this.closed = false;
    this.text = document.createTextNode("");
    this.begun = false; // its first line is the fence
    this.fresh = true; // nothing of the current line is shown
    this.shown = 0; // characters of the current line
    const bar = make("div", { className: "bar" }, make("span", { textContent: language }));
    bar.append(copyButton(() => this.text.data));
    const code = make("code", {}, this.text);
    this.node = make("div", { className: "fence", dir: "ltr" }, bar, make("pre", { tabIndex: 0 }, code));
    this.lines = 0;
  }

  add(line) {
    if (!this.begun) this.begun = true;
    else if (this.end.test(line)) this.closed = true;
    else {
      this.#show(line);
      this.lines += 1;
      this.shown = 0;
      this.fresh = true;
    }
  }

  preview(line) {
    if (this.begun) this.#show(line);
  }

  #show(line) {
    const text = line.replace(this.indent, "");
    const gap = this.fresh && this.lines ? "\n" : "";
    this.text.appendData(gap + text.slice(this.shown));
    this.shown = text.length;
    this.fresh = false;
  }
}

/** Rows under a head. Only the last row is drawn again. */
export class Table {
  constructor(head, delimiters) {
    this.aligned = cells(delimiters).map((cell) => alignment(cell.trim()));
    this.body = make("tbody");
    const table = make("table", {}, make("thead", {}, this.#row(head, "th")), this.body);
    this.node = make("div", { className: "table" }, table);
    this.live = null;
  }

  add(line) {
    this.preview(line);
    this.live = null;
  }

  preview(line) {
    const row = this.#row(line, "td");
    if (this.live) this.live.replaceWith(row);
    else this.body.append(row);
    this.live = row;
  }

  #row(line, tag) {
    const texts = cells(line);
    const row = this.aligned.map((side, index) => {
      return make(tag, side && { className: side }, inline((texts[index] ?? "").trim()));
    });
    return make("tr", {}, ...row);
  }
}

function cells(line) {
  const inner = line.trim().replace(/^\||(?<!\\)\|$/g, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|"));
}

function alignment(cell) {
  if (!cell.endsWith(":")) return null;
  return cell.startsWith(":") ? "center" : "end";
}
