// The page: its three views, the key, light and dark.

import { Refused, ask, hasKey, onKeyWanted, useKey } from "./api.js";
import { compare } from "./compare.js";
import { Conversation } from "./conversation.js";
import { live } from "./live.js";
import { asCurl, asPython, asked, mode } from "./request.js";

const part = (id) => document.getElementById(id);
const VIEWS = ["try", "compare", "live"];
const EXAMPLES = { chat: "What is the capital of France?", completion: "def fibonacci(n):\n" };
let running = null; // that can be stopped
let last = null; // request that was sent; null = the form asks for another one
const conversation = new Conversation();

function trouble(error) {
  part("trouble").textContent = error ? error.message : "";
  part("trouble").hidden = !error;
  if (error) part("trouble").scrollIntoView({ block: "nearest" });
  if (error && !(error instanceof Refused)) throw error;
}

// Views

function show() {
  const view = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "try";
  part("asking").hidden = view === "live";
  for (const name of VIEWS) part(`view-${name}`).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  part("drafts-field").hidden = view === "compare";
  part("send").textContent = view === "compare" ? "Run both" : "Send";
  part("new").hidden = view !== "try" || conversation.empty;
  live.show(view === "live").catch(trouble);
  return view;
}

// Light and dark

function paint(theme) {
  document.documentElement.dataset.theme = theme;
  part("theme").textContent = theme === "dark" ? "Light" : "Dark";
}

const preferred = matchMedia("(prefers-color-scheme: dark)");
const theme = () => localStorage.getItem("outrider-theme") ?? (preferred.matches ? "dark" : "light");
preferred.addEventListener("change", () => paint(theme()));
part("theme").addEventListener("click", () => {
  localStorage.setItem("outrider-theme", theme() === "dark" ? "light" : "dark");
  paint(theme());
});

// The key

function keyDialog(wrong) {
  const dialog = part("key-dialog");
  part("key-why").classList.toggle("wrong", wrong !== "");
  part("key-why").textContent = wrong || "This service asks for a key. It is kept until you close this tab.";
  part("key-value").value = "";
  if (!dialog.open) dialog.showModal();
  part("key-value").focus();
  return new Promise((given) => {
    const done = (taken) => {
      part("key-form").onsubmit = part("key-cancel").onclick = dialog.oncancel = null;
      if (dialog.open) dialog.close();
      given(taken);
    };
    part("key-form").onsubmit = (event) => {
      event.preventDefault();
      useKey(part("key-value").value.trim());
      done(true);
    };
    part("key-cancel").onclick = dialog.oncancel = () => done(false);
  });
}

let asking = null; // one dialog at a time, whoever wants a key
onKeyWanted((wrong) => (asking ??= keyDialog(wrong).finally(() => (asking = null))));
part("key").addEventListener("click", async () => {
  if (await keyDialog("")) await models().catch(trouble);
});

// Requests

async function models() {
  const response = await ask("v1/models");
  const names = (await response.json()).data.map((model) => model.id);
  part("model").replaceChildren(...names.map((name) => new Option(name, name)));
  if (!names.length) throw new Refused("No model is served at the moment: no verifier is connected.");
  trouble(null);
  const told = await (await ask("tokenizer_info")).json();
  const chats = Boolean(told.chat_template);
  const [chat, completion] = document.querySelectorAll("input[name=mode]");
  chat.disabled = !chats;
  chat.parentElement.title = chats ? "" : "The model has no chat template.";
  if (!chats && chat.checked) choose(completion);
}

async function send(request) {
  if (running) return;
  trouble(null);
  const view = show();
  const work = view === "compare" ? compare(request) : conversation.send(request, send);
  running = work;
  part("send").disabled = true;
  part("stop-now").hidden = false;
  last = request;
  try {
    const answered = await work.done;
    if (last === request) last = answered;
  } catch (error) {
    trouble(error);
  } finally {
    running = null;
    part("send").disabled = false;
    part("stop-now").hidden = true;
    show();
  }
}

const wanted = () => asked(mode() === "chat" && show() === "try" ? conversation.turns : []);
part("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (part("prompt").value) send(wanted());
});
part("request").addEventListener("input", () => {
  if (part("prompt").value) last = null; // else nothing is asked for but what was sent
});
part("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    part("request").requestSubmit();
  }
});
part("stop-now").addEventListener("click", () => running?.stop());
part("new").addEventListener("click", () => {
  conversation.clear();
  last = null;
  show();
  part("prompt").focus();
});

function choose(choice) {
  choice.checked = true;
  part("prompt-name").textContent = mode() === "chat" ? "Message" : "Prompt";
  if (["", ...Object.values(EXAMPLES)].includes(part("prompt").value))
    part("prompt").value = EXAMPLES[mode()];
}

for (const choice of document.querySelectorAll("input[name=mode]")) {
  choice.addEventListener("change", () => choose(choice));
}

async function copy(text) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copyWithout(text);
  part("copied").textContent = "copied";
  setTimeout(() => (part("copied").textContent = ""), 2000);
}

/** Browsers keep the clipboard from pages that came in the clear, but for those of this machine. */
function copyWithout(text) {
  const place = document.createElement("textarea");
  place.value = text;
  document.body.append(place);
  place.select();
  document.execCommand("copy");
  place.remove();
}

part("copy-curl").addEventListener("click", () => copy(asCurl(last ?? wanted(), hasKey())));
part("copy-python").addEventListener("click", () => copy(asPython(last ?? wanted(), hasKey())));

paint(theme());
part("prompt").value ||= EXAMPLES[mode()];
addEventListener("hashchange", show);
show();
models().catch(trouble);
