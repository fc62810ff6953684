// What stands inside a line of markdown: code, emphasis, links. Everything else, tags included, is text.

import { make } from "./dom.js";

const DEEPEST = 16; // emphasis that may wait for its end at a time: a bound on work and on nesting

const LABEL = String.raw`\[(?<label>(?:\\.|[^\[\]\\]|\[[^\[\]]*\])+)\]`;
const TARGET = String.raw`<?(?<target>https?:\/\/(?:[^\s<>()]|\([^\s<>()]*\))+)>?(?:\s+"[^"]*")?`;
// A bare address ends before punctuation, and holds parentheses only in pairs.
const PAIR = "\\([^\\s<>\"`()]*\\)";
const ADDRESS = `https?://(?:[^\\s<>"\`()]|${PAIR})*(?:[^\\s<>"\`().,:;!?*_~'\\[\\]、。，；：！？）」]|${PAIR})`;

const PATTERNS = [
  String.raw`(?<escape>\\[\\*_#~|<>+.!\-${"`"}])`, // not brackets: \( and \[ begin formulas, which stay as written
  "(?<!`)(?<ticks>`+)(?!`)(?<code>.+?)(?<!`)\\k<ticks>(?!`)",
  String.raw`!?${LABEL}\(\s*${TARGET}\s*\)`, // a picture is a link too: nothing is loaded from elsewhere
  `(?<!\\w)(?<url>${ADDRESS})`,
  String.raw`(?<run>\*+|_+)`,
];
const TOKEN = new RegExp(PATTERNS.join("|"), "gsu");

/** The nodes of a text. `links`: whether there may be any. */
export function inline(text, links = true) {
  const root = document.createDocumentFragment();
  const open = []; // delimiters that may begin emphasis
  let end = 0;
  for (const match of text.matchAll(TOKEN)) {
    const { escape, code, label, target, url, run } = match.groups;
    root.append(text.slice(end, match.index));
    end = match.index + match[0].length;
    if (escape) root.append(escape === "\\\\" ? escape : escape.slice(1));
    else if (code) root.append(make("code", { textContent: unpadded(code) }));
    else if (run) emphasise(delimiter(run, text[match.index - 1], text[end], root), open);
    else root.append(links ? link(target ?? url, label ? inline(label, false) : url) : match[0]);
  }
  root.append(text.slice(end));
  root.normalize();
  return root;
}

/** The spaces that let code begin or end with a backtick are not part of it. */
function unpadded(code) {
  return /^ .*[^ ].* $/s.test(code) ? code.slice(1, -1) : code;
}

function link(href, content) {
  return make("a", { href, target: "_blank", rel: "noopener noreferrer" }, content);
}

/** A run of stars or underscores, and what it may be. Underscores within a word are part of the word. */
function delimiter(run, before = " ", after = " ", root) {
  const node = document.createTextNode(run);
  root.append(node);
  const inWord = run[0] === "_" && /\w/.test(before) && /\w/.test(after);
  return { node, char: run[0], opens: !inWord && /\S/.test(after), closes: !inWord && /\S/.test(before) };
}

/** End what this delimiter ends, and note it if it may begin something with what is left of it. */
function emphasise(closer, open) {
  while (closer.closes && closer.node.length) {
    const index = open.findLastIndex((opener) => pair(opener, closer));
    if (index < 0) break;
    const opener = open[index];
    open.length = index + 1;
    wrap(opener, closer);
    if (!opener.node.length) open.pop();
  }
  if (!closer.opens || !closer.node.length) return;
  if (open.length === DEEPEST) open.shift();
  open.push(closer);
}

/** CommonMark's rule, the one about multiples of three included: it keeps ** together around a single *. */
function pair(opener, closer) {
  const [first, second] = [opener.node.length, closer.node.length];
  const either = opener.closes || closer.opens;
  return opener.char === closer.char && !(either && (first + second) % 3 === 0 && (first % 3 || second % 3));
}

function wrap(opener, closer) {
  const used = Math.min(2, opener.node.length, closer.node.length);
  const element = make(used === 2 ? "strong" : "em");
  while (opener.node.nextSibling !== closer.node) element.append(opener.node.nextSibling);
  opener.node.after(element);
  opener.node.deleteData(0, used);
  closer.node.deleteData(0, used);
}
