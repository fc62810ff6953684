// What is told about an answer, in one line.

const ENDS = {
  stopped: "stopped",
  left: "the page was closed before the end",
  length: "cut at max tokens or the end of the context",
};

/** For example: 1,204 prompt tokens (1,100 cached) · first token after 0.4 s · 310 tokens · 21.3 tok/s */
export function summary({ figures, end }) {
  const { prompt, cached, completion, first, writing } = figures;
  const parts = [];
  if (prompt !== undefined) parts.push(`${count(prompt, "prompt token")}${cached ? ` (${number(cached)} cached)` : ""}`);
  if (first !== undefined) parts.push(`first token after ${seconds(first)}`);
  if (completion !== undefined) parts.push(count(completion, "token"));
  if (completion > 1 && writing > 0) parts.push(`${((completion - 1) / writing).toFixed(1)} tok/s`);
  if (ENDS[end]) parts.push(ENDS[end]);
  return parts.join(" · ");
}

export function seconds(value) {
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

/** For what is still running. */
export function whole(value) {
  return `${Math.max(0, Math.floor(value))} s`;
}

function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

function number(value) {
  return value.toLocaleString("en");
}
