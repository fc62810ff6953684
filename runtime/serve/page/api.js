// The server's API: the OpenAI one, at the address the page came from.

import { events } from "./sse.js";
import { keep, recall } from "./storage.js";

const ROOT = new URL("v1/", document.baseURI); // relative: the page may stand behind a proxy, below some path
const KEY = "mosaic.key";
let key = recall("sessionStorage", KEY, null);

/** What went wrong, in words. `status`: of HTTP, 0 without an answer; `retryAfter`: seconds, where the server says. */
export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Forgotten with the tab. */
export function useKey(value) {
  key = value;
  keep("sessionStorage", KEY, key);
}

/** The name of the model that is served. */
export async function modelName() {
  const response = await request("models");
  const { data } = await response.json();
  return data[0].id;
}

/** The chunks of an answer as they come. ApiError also for a stream that breaks off. */
export async function* chat(body, signal) {
  const stream = { stream: true, stream_options: { include_usage: true } };
  const response = await request("chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, ...stream }),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(`The server gave up: ${chunk.error.message}`);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof SyntaxError) throw new ApiError("The server sent something that is not its API.");
    if (!(error instanceof TypeError)) throw error; // a TypeError here is the network's
  }
  throw new ApiError("The connection ended before the answer was complete.");
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { ...options, headers });
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError("The server cannot be reached. Is it running?");
    throw error;
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { status } = response;
  const wait = parseInt(response.headers.get("Retry-After"), 10); // the other form, a date, counts as none
  const again = wait > 0 ? ` Try again in ${wait} s.` : "";
  const said = await reason(response);
  return new ApiError(`${meaning(status)}: ${said}.${again}`, status, wait > 0 ? wait : null);
}

/** What the server says itself: in the API's form, or else (a proxy's page, say) only the status. */
async function reason(response) {
  try {
    return (await response.json()).error.message.replace(/\.$/, "");
  } catch {
    return `HTTP ${response.status} ${response.statusText}`.trim();
  }
}

function meaning(status) {
  if (status === 401) return "The server asks for an API key";
  if (status === 429) return "The server is busy";
  if (status === 503) return "The server is not ready";
  return status >= 500 ? "The server failed" : "The server refused this";
}
