// Markdown as it arrives, into a page: a safe subset, built of nodes. Complete lines are never looked at again.
// Of the line that is still being written a preview is shown, unless it is too short to tell what it will be.

import { make } from "./dom.js";
import { Fence, Heading, Paragraph, Rule, Table } from "./leaves.js";

const DEEPEST = 8; // lists and quotes within each other
const LONGEST = 1000; // characters of a heading; it is drawn as a whole with every word

const FENCE = /^(\s*)(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const RULE = /^\s*([-*_])(?:\s*\1){2,}\s*$/;
const HEADING = /^\s*(#{1,6})\s+\S/;
const QUOTE = /^\s*> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:(\s+)(?=\S)|\s*$)/;
const UNDECIDED = /^(?:[-*+_|:>\s]*|#{1,6}|`+|~+|\d{1,9}[.)]?)$/;

/** Markdown that is written into an element. */
export class Markdown {
  constructor(root) {
    this.blocks = new Blocks(root, 0);
    this.tail = ""; // the line that is not complete
  }

  append(text) {
    const lines = (this.tail + text).split("\n");
    this.tail = lines.pop();
    for (const line of lines) this.blocks.line(line.replace(/\r$/, ""));
    this.blocks.preview(this.tail.replace(/\r$/, "")); // which may be half of \r\n
  }

  finish() {
    if (this.tail) this.blocks.line(this.tail);
    this.tail = "";
  }
}

/** One block below the other: the whole text, or what is in an item or a quote. */
class Blocks {
  constructor(root, depth) {
    this.root = root;
    this.depth = depth;
    this.open = null; // the block that may go on
    this.draft = null; // a block of which only a preview is known
  }

  line(line) {
    if (!line.trim()) return this.#blank();
    if (this.open instanceof Paragraph && this.open.isHead(line)) return this.#table(line);
    const block = this.#blockOf(line);
    block.add(line);
    this.open = block;
    this.draft = null;
  }

  preview(line) {
    if (!UNDECIDED.test(line.trim())) this.#blockOf(line).preview(line);
  }

  /** Whether a line without the marks of this container is still text of the paragraph in it. */
  goesOn(line) {
    return this.open instanceof Paragraph ? takes(this.open, line) : Boolean(this.open?.blocks?.goesOn(line));
  }

  #blank() {
    if (this.open instanceof Fence || this.open?.blocks) this.open.add("");
    else this.open = null;
  }

  #table(line) {
    const table = new Table(this.open.text, line);
    this.#place(table);
    this.open.node.remove();
    this.open = table;
  }

  #blockOf(line) {
    const goesOn = this.open && takes(this.open, line);
    const { key, build } = this.depth < DEEPEST ? beginning(line) : PARAGRAPH;
    if (!goesOn && this.draft?.key === key) return this.draft;
    this.draft?.node.remove();
    this.draft = null;
    if (goesOn) return this.open;
    this.draft = build(this.depth);
    this.draft.key = key;
    this.#place(this.draft);
    return this.draft;
  }

  /** Every outermost block finds out its direction by itself: an answer may mix scripts. */
  #place(block) {
    if (this.depth === 0 && !block.node.dir) block.node.dir = "auto";
    this.root.append(block.node);
  }
}

/** Whether a block goes on with a line that is not blank. */
function takes(block, line) {
  if (block instanceof Paragraph) return isText(line) && (!isRow(line) || isRow(block.text));
  if (block instanceof Fence) return !block.closed;
  if (block instanceof Table) return line.includes("|") && isText(line);
  return Boolean(block.takes?.(line));
}

/** What may be the head of a table stands for itself. */
function isRow(line) {
  return /^\s*\|/.test(line);
}

/** Not the beginning of something else. A number with a dot in the middle of a sentence is no list, unless it is 1. */
function isText(line) {
  const { key } = beginning(line);
  return key === "p" || (key.startsWith("ol") && key !== "ol1");
}

const PARAGRAPH = { key: "p", build: () => new Paragraph() };

/** What begins with a line. `key`: the same as long as a longer line means the same block. */
function beginning(line) {
  let found;
  if ((found = FENCE.exec(line))) {
    const [, indent, mark, info] = found;
    return { key: line, build: () => new Fence(width(indent), mark, info.trim().split(/[\s{,]/)[0]) };
  }
  if (RULE.test(line)) return { key: "hr", build: () => new Rule() };
  if (line.length < LONGEST && (found = HEADING.exec(line))) {
    const level = found[1].length;
    return { key: `h${level}`, build: () => new Heading(level) };
  }
  if (QUOTE.test(line)) return { key: "quote", build: (depth) => new Quote(depth) };
  if ((found = ITEM.exec(line))) {
    const [, indent, mark] = found;
    const start = mark.length > 1 ? parseInt(mark, 10) : null;
    const key = start === null ? `ul${mark}` : `ol${start}`;
    return { key, build: (depth) => new List(depth, width(indent), mark.at(-1), start) };
  }
  return PARAGRAPH;
}

class Quote {
  constructor(depth) {
    this.node = make("blockquote");
    this.blocks = new Blocks(this.node, depth + 1);
  }

  takes(line) {
    return QUOTE.test(line) || (isText(line) && this.blocks.goesOn(line));
  }

  add(line) {
    if (!line) this.blocks.open = null; // a blank line without the mark ends what is in it
    else this.blocks.line(line.replace(QUOTE, ""));
  }

  preview(line) {
    this.blocks.preview(line.replace(QUOTE, ""));
  }
}

class List {
  constructor(depth, indent, mark, start) {
    this.node = start === null ? make("ul") : make("ol", { start });
    this.depth = depth;
    this.indent = indent;
    this.mark = mark; // tells this list from one that follows it: its bullet, or the sign after its numbers
    this.blocks = null; // in the last item
    this.content = 0; // columns before the last item's text
    this.fresh = false; // the last item is there because of a preview
  }

  takes(line) {
    return this.#isItem(line) || this.#isInside(line) || (isText(line) && this.blocks.goesOn(line));
  }

  add(line) {
    const inner = this.#enter(line);
    this.blocks.line(inner);
    this.fresh = false;
  }

  preview(line) {
    const inner = this.#enter(line);
    this.blocks.preview(inner);
  }

  /** The line without what belongs to the list. A line that begins an item finds a new one made for it. */
  #enter(line) {
    if (!this.#isItem(line)) return dedent(line, this.content);
    const [mark, indent, sign, space] = ITEM.exec(line);
    if (!this.fresh) {
      const item = make("li");
      this.node.append(item);
      this.blocks = new Blocks(item, this.depth + 1);
      this.content = width(indent) + sign.length + (space?.length < 5 ? space.length : 1);
      this.fresh = true;
    }
    return line.slice(mark.length);
  }

  #isItem(line) {
    const [, indent, sign] = ITEM.exec(line) ?? [];
    if (!sign || RULE.test(line)) return false;
    const ordered = this.node.tagName === "OL";
    return sign.at(-1) === this.mark && ordered === sign.length > 1 && width(indent) < this.indent + 2;
  }

  /** Models often indent by two columns what belongs under a number of three. */
  #isInside(line) {
    return width(/^\s*/.exec(line)[0]) >= Math.min(this.indent + 2, this.content);
  }
}

/** Columns that a beginning of a line takes. */
function width(space) {
  return space.replaceAll("\t", "    ").length;
}

/** A line without so many columns of its indentation. A tab goes whole. */
function dedent(line, columns) {
  let at = 0;
  for (let left = columns; left > 0 && /[ \t]/.test(line[at] ?? ""); at += 1) left -= width(line[at]);
  return line.slice(at);
}
