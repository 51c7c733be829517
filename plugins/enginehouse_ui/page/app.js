// The page: navigation, the key, the connection and the theme around the views.
import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { saveKey, savedKey } from "./lib/api.js";
import { readChats } from "./lib/chats.js";
import { problem } from "./lib/parts.js";
import { speech } from "./lib/speech.js";
import { onDraw, readModels, state, update } from "./lib/state.js";
import { chatView } from "./views/chat.js";
import { compareView } from "./views/compare.js";
import { connectView } from "./views/connect.js";
import { compressionView, routingView } from "./views/dry_runs.js";
import { engineView } from "./views/engine.js";
import { inspectView } from "./views/inspect.js";
import { modelsView } from "./views/models.js";
import { requestsView } from "./views/requests.js";

const VIEWS = {
  chat: chatView, inspect: inspectView, compare: compareView, models: modelsView, requests: requestsView, engine: engineView,
  routing: routingView, compression: compressionView, connect: connectView,
};
const GROUPS = [["Use", ["chat", "inspect", "compare"]], ["Operate", ["models", "requests", "engine"]], ["Understand", ["routing", "compression", "connect"]]];
const THEMES = { system: "light dark", light: "light", dark: "dark" };
const MODELS_EVERY_MS = 5000;

let name = "";
let timer = 0;
let keyProblem = "";
let theme = localStorage.getItem("enginehouse.theme") ?? "system";

function go() {
  const asked = location.hash.replace(/^#\/?/, "") || "chat";
  const next = VIEWS[asked] ? asked : "chat";
  if (next === name) return;
  VIEWS[name]?.leave?.();
  name = next;
  clearInterval(timer);
  const view = VIEWS[name];
  document.title = `${view.title} · Enginehouse`;
  view.enter?.();
  if (view.everyMs) timer = setInterval(() => document.hidden || view.tick(), view.everyMs);
  scrollTo(0, 0);
  update();
}

function setTheme(event) {
  theme = event.target.value;
  localStorage.setItem("enginehouse.theme", theme);
  applyTheme();
}

function applyTheme() {
  document.documentElement.style.colorScheme = THEMES[theme];
  update();
}

async function enterKey(event) {
  event.preventDefault();
  const form = event.target;
  saveKey(form.key.value.trim(), form.remember.checked);
  form.key.value = "";
  state.isAdmin = null;
  keyProblem = "";
  await readModels();
  if (state.needsKey) keyProblem = "The server does not know this key.";
  else VIEWS[name].enter?.();
  update();
}

function keyBox() {
  return html`<div class="gate"><form class="card" @submit=${enterKey}>
    <h2>This server needs a key</h2>
    <p class="muted">It is kept until this tab is closed, and sent in a header only.</p>
    <div class="field"><label for="key">API key</label><input id="key" name="key" type="password" autocomplete="off" required aria-describedby="key-problem" aria-invalid=${keyProblem ? "true" : "false"}>
      <p class="about" id="key-problem" role="alert">${keyProblem ? html`<strong class="bad">${keyProblem}</strong>` : nothing}</p></div>
    <label class="check"><input type="checkbox" name="remember"> Remember it on this computer: everybody who uses this browser profile can then use it</label>
    <button>Use this key</button></form></div>`;
}

function navigation() {
  return html`<nav aria-label="Views"><a class="brand" href="#/chat"><img src="icon.svg" alt="" width="24" height="24"> Enginehouse</a>
    ${GROUPS.map(([title, names]) => {
      const shown = names.filter((one) => !VIEWS[one].isAdmin || state.isAdmin);
      return shown.length ? html`<div class="group"><p class="group-title">${title}</p><ul>${shown.map((one) => html`<li><a href="#/${one}" aria-current=${one === name ? "page" : nothing}>${VIEWS[one].title}</a></li>`)}</ul></div>` : nothing;
    })}
    <div class="foot">
      <label for="theme">Theme</label><select id="theme" @change=${setTheme}>${Object.keys(THEMES).map((one) => html`<option value=${one} ?selected=${one === theme}>${one}</option>`)}</select>
      <label class="check"><input type="checkbox" .checked=${speech.isOn} @change=${(event) => { speech.isOn = event.target.checked; }}> Announce answers</label>
      ${savedKey() ? html`<button type="button" class="quiet small" @click=${() => { saveKey("", false); location.reload(); }}>Forget the key</button>` : nothing}
    </div></nav>`;
}

function page() {
  const view = VIEWS[name];
  const isForbidden = view.isAdmin && state.isAdmin === false;
  return html`<a class="skip" href="#main" @click=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    ${navigation()}
    <main id="main" tabindex="-1" class="view-${name}">
      <h1>${view.title}</h1>
      ${state.isOnline ? nothing : problem("The server cannot be reached. This page tries again every few seconds.", html`<button type="button" @click=${readModels}>Try now</button>`)}
      ${state.needsKey ? keyBox() : isForbidden ? problem("Your key has no scope `admin`, or the server is on another machine and has no keys: this view needs one of them.") : view.render()}
    </main>
    <div id="spoken" class="visually-hidden" aria-live="polite"></div>`;
}

const root = document.getElementById("app");
onDraw(() => {
  const main = document.scrollingElement;
  const isAtEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 80;
  const isChat = name === "chat";
  render(page(), root);
  if (isChat && isAtEnd && document.querySelector('.message[aria-busy="true"]')) main.scrollTop = main.scrollHeight;
});

addEventListener("hashchange", go);
// A browser opens six connections to a server: tabs that are not seen hold none for events.
document.addEventListener("visibilitychange", () => (document.hidden ? VIEWS[name].leave?.() : VIEWS[name].enter?.()));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented) VIEWS[name].onEscape?.();
});
setInterval(() => document.hidden || state.needsKey || readModels(), MODELS_EVERY_MS);
applyTheme();
go();
readChats();
readModels();
