// Server-sent events out of a response's body, exact however the bytes are cut. EventSource cannot POST, hence this.

/** The `data` of every event, as it is complete. An event without its blank line at the end is none (the standard). */
export async function* events(body) {
  let data = [];
  for await (const line of lines(texts(body))) {
    if (line === "") {
      if (data.length) yield data.join("\n");
      data = [];
    } else if (line === "data" || line.startsWith("data:")) {
      const value = line.slice("data:".length);
      data.push(value.startsWith(" ") ? value.slice(1) : value);
    } // comments and the fields event, id and retry mean nothing here
  }
}

/** Text as it arrives. The decoder keeps the beginning of a character until the rest is there. */
async function* texts(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      yield decoder.decode(value, { stream: true });
    }
    yield decoder.decode();
  } finally {
    reader.cancel().catch(() => {}); // an aborted body has nothing left to cancel, and says so
  }
}

/** Complete lines, ended by \n, \r\n or \r, without their ends. */
export async function* lines(chunks) {
  let rest = ""; // of a line that is not complete: no line end in it, but for a \r that may be half of \r\n
  for await (const chunk of chunks) {
    const found = (rest + chunk).split(/\r\n|\n|\r(?!$)/);
    rest = found.pop();
    yield* found;
  }
  if (rest.endsWith("\r")) yield rest.slice(0, -1);
}
