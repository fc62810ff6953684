// The page: one conversation with the server it came from.

import { answer } from "./answer.js";
import { useKey, modelName } from "./api.js";
import { Conversation } from "./conversation.js";
import { make } from "./dom.js";
import { fit, isEnter } from "./editor.js";
import { toEnd } from "./scroll.js";
import { Settings } from "./settings.js";
import { AnswerTurn, userTurn } from "./turns.js";

const RETRY = 3; // seconds between attempts to reach a server that does not say when

const at = (id) => document.getElementById(id);
const conversation = new Conversation();
const settings = new Settings(at("settings").querySelector("form"));
let model = null; // its name, once the server has told
let running = null; // the answer that is being written: { controller, done }

/** Put a message on the page. */
function show(message) {
  if (message.role === "user") {
    at("turns").append(userTurn(message, (text) => editTo(message, text)));
    return null;
  }
  const turn = new AnswerTurn(message, () => regenerate(message));
  at("turns").append(turn.node);
  return turn;
}

async function send(text) {
  await stop();
  conversation.ask(text);
  show(conversation.messages.at(-1));
  begin();
}

async function regenerate(message) {
  await stop();
  if (!conversation.messages.includes(message)) return; // asked twice
  cut(message);
  begin();
}

async function editTo(message, text) {
  await stop();
  if (!conversation.messages.includes(message)) return;
  cut(message);
  await send(text);
}

/** Take a message and all after it off the conversation and the page. */
function cut(message) {
  const index = conversation.messages.indexOf(message);
  conversation.cut(message);
  for (const turn of [...at("turns").children].slice(index)) turn.remove();
}

/** Have the conversation answered. */
function begin() {
  const history = conversation.history(settings.system);
  const body = { ...(model && { model }), messages: history, ...settings.parameters };
  const message = conversation.beginAnswer();
  const controller = new AbortController();
  const done = write(body, message, show(message), controller.signal);
  running = { controller, done };
  draw();
  toEnd();
  focusPrompt();
}

async function write(body, message, turn, signal) {
  conversation.keep();
  turn.wait();
  const error = await answer(body, message, signal, (reasoning, content) => turn.write(reasoning, content));
  running = null;
  turn.finish();
  if (error?.status === 401) askForKey();
  conversation.keep();
  draw();
}

/** End the answer that is being written; what there is of it stays. */
async function stop() {
  running?.controller.abort();
  await running?.done;
}

/** What depends on whether something is being written, or was. */
function draw() {
  at("send").textContent = running ? "Stop" : "Send";
  at("turns").ariaBusy = String(Boolean(running)); // read out when complete, not word by word
  const empty = !conversation.messages.length;
  at("empty").hidden = !empty;
  at("export").disabled = at("new").disabled = empty;
}

/** Where there is a keyboard: on a phone it would come up and hide the answer. */
function focusPrompt() {
  if (matchMedia("(pointer: fine)").matches) at("prompt").focus({ preventScroll: true });
}

function submit() {
  const text = at("prompt").value.trim();
  if (!text) return;
  at("prompt").value = "";
  fit(at("prompt"));
  send(text);
}

async function clear() {
  if (!confirm("Forget this conversation?")) return;
  await stop();
  cut(conversation.messages[0]);
  conversation.keep();
  draw();
  focusPrompt();
}

/** As a file, which /load of mosaic-run reads too. */
function save() {
  const { system, values } = settings;
  const content = { version: 1, model, messages: conversation.history(system), settings: values };
  const file = new Blob([JSON.stringify(content, null, 2), "\n"], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(file), download: "conversation.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

function notice(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

function askForKey() {
  at("key").hidden = false;
  at("key-value").focus();
}

/** Learn the model's name, as soon as the server is there. */
async function connect() {
  for (;;) {
    try {
      model = await modelName();
      document.title = at("model").textContent = model;
      return notice("");
    } catch (error) {
      if (error.status === 401) {
        notice("");
        return askForKey();
      }
      notice(error.message);
      if (error.status !== 0 && error.status !== 503) return;
      await new Promise((resolve) => setTimeout(resolve, 1000 * (error.retryAfter ?? RETRY)));
    }
  }
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else submit();
});
at("prompt").addEventListener("keydown", (event) => {
  if (!isEnter(event)) return;
  event.preventDefault();
  if (!running) submit();
});
at("prompt").addEventListener("input", () => fit(at("prompt")));
at("new").addEventListener("click", clear);
at("export").addEventListener("click", save);
at("open-settings").addEventListener("click", () => at("settings").showModal());
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key-value").value);
  at("key").hidden = true;
  connect();
  const last = conversation.messages.at(-1);
  if (last?.end === "failed") regenerate(last);
});
addEventListener("pagehide", () => conversation.keep());

for (const message of conversation.messages) {
  const turn = show(message);
  turn?.write(message.reasoning_content, message.content);
  turn?.finish();
}
draw();
toEnd();
connect();
