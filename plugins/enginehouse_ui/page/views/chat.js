// Chat: a tree of messages, an answer as it comes, and everything that the request says.
import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { repeat } from "../vendor/lit-html/directives/repeat.js";
import { live } from "../vendor/lit-html/directives/live.js";
import { addNode, chats, forget, importChat, keep, newChat, openChat, pathTo, runningIn, showBranch, showChat, siblings } from "../lib/chats.js";
import { DEMO_TOOLS, runDemo } from "../lib/demo_tools.js";
import { answer, bodyOf, stop, stopAll, takes } from "../lib/generate.js";
import { parsed, problemOfSchema, problemOfValue } from "../lib/json_schema.js";
import { copyButton, milliseconds, number, plural, problem, stateBadge } from "../lib/parts.js";
import { asAnthropic, asCurl, asOpenAI } from "../lib/snippets.js";
import { detailsOf, modelNames, modelOf, state, update } from "../lib/state.js";
import { say, sayEnd } from "../lib/speech.js";
import { inspect } from "./inspect.js";
import { parameterForm } from "./parameters.js";

const MOST_IMAGE_BYTES = 8_000_000;
let editing = null; // {node, text}
let draft = { text: "", images: [] };
let note = "";
let asWhat = "curl";
const results = new Map(); // text of a tool's result, by "message/call"
let isSettingsOpen = matchMedia("(min-width: 75rem)").matches;

function chosenModel(chat) {
  const names = modelNames();
  if (!chat.model || (state.modelsRead && names.length && !names.includes(chat.model) && !modelOf(chat.model))) {
    const ready = state.models.find((model) => model.state === "ready" && model.task === "generate");
    chat.model = ready?.id ?? names[0] ?? "";
  }
  return chat.model;
}

const announced = (text, isEnd) => (isEnd ? sayEnd() : say(text));

async function run(chat, leaf, extra) {
  note = "";
  await answer(chat, leaf, extra, announced);
}

function send(event) {
  event?.preventDefault();
  const chat = chats.open;
  const text = draft.text;
  if ((!text.trim() && !draft.images.length) || isRunning(chat) || !chat.model) return;
  const problemNow = problemsOf(chat);
  if (problemNow) {
    note = problemNow;
    update();
    return;
  }
  const node = addNode(chat, chat.leaf, { role: "user", content: text, images: draft.images });
  draft = { text: "", images: [] };
  run(chat, node.id);
}

function problemsOf(chat) {
  const tools = parsed(chat.tools);
  const schema = parsed(chat.schema);
  if (tools.problem) return `Tools: ${tools.problem}`;
  if (tools.value !== undefined && !Array.isArray(tools.value)) return "Tools must be a list.";
  if (schema.problem) return `JSON Schema: ${schema.problem}`;
  return schema.value === undefined ? "" : problemOfSchema(schema.value);
}

const isRunning = (chat) => pathTo(chat).some((node) => node.isRunning);

function regenerate(chat, node) {
  run(chat, node.parent, chat.parameters.seed === undefined ? {} : { seed: Math.floor(Math.random() * 2 ** 31) });
}

function saveEdit(event) {
  event.preventDefault();
  const { node, text } = editing;
  const chat = chats.open;
  editing = null;
  if (node.role === "assistant") {
    addNode(chat, node.parent, { ...node, content: text, tokens: [], finish: "edited", isRunning: false });
    update();
  } else {
    const changed = addNode(chat, node.parent, { role: "user", content: text, images: node.images });
    run(chat, changed.id);
  }
}

async function addFiles(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) note = `${file.name} is not an image.`;
    else if (file.size > MOST_IMAGE_BYTES) note = `${file.name || "The image"} has ${number(file.size / 1e6)} MB; the most is ${MOST_IMAGE_BYTES / 1e6} MB.`;
    else {
      const url = await new Promise((resolve) => {
        const reader = new FileReader();
        reader.onload = () => resolve(reader.result);
        reader.readAsDataURL(file);
      });
      draft.images.push(url);
      note = "";
    }
  }
  update();
}

// -- messages ---------------------------------------------------------------------------------------

function message(chat, node) {
  if (editing?.node === node) return editor();
  if (node.role === "user") return userMessage(chat, node);
  if (node.role === "tool") return html`<article class="message tool" aria-label="Result of a tool"><h2>Result</h2><pre tabindex="0">${node.content}</pre></article>`;
  return assistantMessage(chat, node);
}

function editor() {
  return html`<form class="message editor" @submit=${saveEdit}>
    <label for="edit">Edit; the old text stays as a branch</label>
    <textarea id="edit" rows="4" .value=${live(editing.text)} @input=${(event) => (editing.text = event.target.value)}></textarea>
    <div class="row"><button>${editing.node.role === "user" ? "Send" : "Save"}</button>
    <button type="button" class="quiet" @click=${() => { editing = null; update(); }}>Cancel</button></div>
  </form>`;
}

function branches(chat, node) {
  const all = siblings(chat, node);
  if (all.length < 2) return nothing;
  const at = all.indexOf(node);
  const step = (to) => () => showBranch(chat, all[to]);
  return html`<span class="branches" role="group" aria-label="Branches">
    <button type="button" class="quiet small" ?disabled=${at === 0} aria-label="Previous branch" @click=${step(at - 1)}>‹</button>
    <span>${at + 1} of ${all.length}</span>
    <button type="button" class="quiet small" ?disabled=${at === all.length - 1} aria-label="Next branch" @click=${step(at + 1)}>›</button>
  </span>`;
}

function userMessage(chat, node) {
  return html`<article class="message user" aria-label="You">
    <h2>You</h2>
    ${node.images?.map((url, index) => html`<img src=${url} alt="Image ${index + 1} of this message">`)}
    <div class="text">${node.content}</div>
    <div class="row actions">${branches(chat, node)}
      <button type="button" class="quiet small" ?disabled=${isRunning(chat)} @click=${() => { editing = { node, text: node.content }; update(); }}>Edit</button>
      ${copyButton(() => node.content)}</div>
  </article>`;
}

function assistantMessage(chat, node) {
  const isLast = chat.leaf === node.id;
  return html`<article class="message assistant" aria-label="Answer of ${node.model}" aria-busy=${node.isRunning ? "true" : "false"}>
    <h2>${node.servedBy ?? node.model}${node.details?.routed ? html` <span class="muted">routed</span>` : nothing}</h2>
    ${node.reasoning ? thinking(node) : nothing}
    ${node.content ? html`<md-view .text=${node.content}></md-view>` : nothing}
    ${node.isRunning ? html`<p class="muted running"><span class="pulse" aria-hidden="true"></span>${node.stalled || (node.content || node.reasoning ? "Writing" : "Reading the prompt")}</p>` : nothing}
    ${node.tokens?.some((token) => token.resumed) || node.wasRestarted
      ? html`<p class="notice">The model's worker was restarted during this answer; the answer continued where it was.</p>` : nothing}
    ${node.calls?.length ? node.calls.filter(Boolean).map((call) => toolCall(chat, node, call)) : nothing}
    ${node.calls?.length && isLast && !node.isRunning ? html`<button type="button" @click=${() => sendResults(chat, node)}>Send the results</button>` : nothing}
    ${node.error ? problem(node.error.message, errorActions(chat, node)) : nothing}
    ${validity(chat, node)}
    ${node.isRunning ? nothing : html`
      <p class="facts">${facts(node)}</p>
      <div class="row actions">${branches(chat, node)}
        <button type="button" class="quiet small" ?disabled=${isRunning(chat)} @click=${() => regenerate(chat, node)}>Regenerate</button>
        <button type="button" class="quiet small" ?disabled=${isRunning(chat)} @click=${() => { editing = { node, text: node.content }; update(); }}>Edit</button>
        ${copyButton(() => node.content)}
        <a class="button quiet small" href="#/inspect" @click=${() => inspect(chat, node)}>Inspect</a>
      </div>`}
  </article>`;
}

function thinking(node) {
  const isThinking = node.isRunning && !node.content;
  const numTokens = node.tokens?.filter((token) => token.thinking).length;
  const speed = numTokens && node.thinkMs > 100 ? `, ${number((1000 * numTokens) / node.thinkMs)} tokens/s` : "";
  return html`<details class="thinking">
    <summary>${isThinking ? "Thinking" : "Thought"}${node.thinkMs >= 50 ? ` for ${milliseconds(node.thinkMs)}` : ""}${speed}</summary>
    <md-view .text=${node.reasoning}></md-view>
  </details>`;
}

function errorActions(chat, node) {
  const details = [node.error.code, node.error.param && `field ${node.error.param}`, node.error.requestId].filter(Boolean);
  return html`${details.length ? html`<p class="muted">${details.join(" · ")}</p>` : nothing}
    <button type="button" @click=${() => regenerate(chat, node)}>Try again</button>`;
}

const ENDS = { length: "cut at max_tokens", tool_calls: "called tools", stopped: "stopped by you", interrupted: "the page was closed", edited: "edited by you", content_filter: "filtered" };

function facts(node) {
  const usage = node.usage;
  const parts = [];
  if (usage) {
    parts.push(plural(usage.completion_tokens, "token"));
    const speed = node.details?.tokens_per_second?.decode;
    if (speed) parts.push(`${number(speed)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  }
  const first = node.details?.timings_ms?.first_token ?? node.firstMs;
  if (first) parts.push(`first token after ${milliseconds(first)}`);
  if (ENDS[node.finish]) parts.push(ENDS[node.finish]);
  return parts.join(" · ");
}

function validity(chat, node) {
  const { value: schema } = parsed(chat.schema);
  if (schema === undefined || !node.content) return nothing;
  const { value, problem: wrong } = parsed(node.content);
  if (wrong) return node.isRunning ? nothing : html`<p class="facts"><span class="badge bad"><span aria-hidden="true">✕</span> not JSON</span></p>`;
  const text = problemOfValue(value, schema);
  return html`<p class="facts"><span class="badge ${text ? "bad" : "good"}"><span aria-hidden="true">${text ? "✕" : "✓"}</span> ${text || "valid against the JSON Schema"}</span></p>`;
}

function toolCall(chat, node, call) {
  const place = `${chat.id}/${node.id}/${call.id}`;
  const { value, problem: wrong } = parsed(call.text || "{}");
  const values = value && typeof value === "object" ? value : {};
  const hasResult = Object.values(chat.nodes).some((other) => other.role === "tool" && other.callId === call.id);
  const demo = !node.isRunning && !wrong ? runDemo(call.name, values) : null;
  return html`<fieldset class="call">
    <legend>Call of <code>${call.name}</code></legend>
    ${Object.entries(values).map(([name, item], index) => html`<div class="field"><label for="call-${call.id}-${index}">${name}</label>
      <input id="call-${call.id}-${index}" readonly .value=${typeof item === "string" ? item : JSON.stringify(item)}></div>`)}
    ${wrong ? html`<pre tabindex="0">${call.text}</pre>` : nothing}
    ${node.isRunning || hasResult ? nothing : html`<div class="field"><label for="result-${call.id}">Result</label>
      <textarea id="result-${call.id}" rows="2" .value=${live(results.get(place) ?? "")}
        @input=${(event) => { results.set(place, event.target.value); update(); }}></textarea></div>
      ${demo === null ? nothing : html`<button type="button" class="quiet small" @click=${() => { results.set(place, runDemo(call.name, values)); update(); }}>Run in this browser</button>`}`}
  </fieldset>`;
}

function sendResults(chat, node) {
  const calls = node.calls.filter(Boolean);
  const missing = calls.find((call) => !results.get(`${chat.id}/${node.id}/${call.id}`));
  if (missing) {
    note = `The call of ${missing.name} has no result yet.`;
    update();
    return;
  }
  let parent = node.id;
  for (const call of calls) parent = addNode(chat, parent, { role: "tool", callId: call.id, content: results.get(`${chat.id}/${node.id}/${call.id}`) }).id;
  run(chat, parent);
}

// -- the parts around them --------------------------------------------------------------------------

function picker(chat) {
  const model = modelOf(chat.model);
  return html`<div class="picker">
    <label for="model" class="visually-hidden">Model</label>
    <select id="model" @change=${(event) => { chat.model = event.target.value; keep(chat); update(); }}>
      ${modelNames().map((name) => {
        const one = modelOf(name);
        return html`<option value=${name} ?selected=${name === chat.model}>${name}${one.id === name ? "" : ` (alias of ${one.id})`}${one.state === "ready" ? "" : `, ${one.state}`}</option>`;
      })}
    </select>
    ${model ? stateBadge(model) : nothing}
  </div>`;
}

function composer(chat) {
  const canSee = takesImages(chat.model);
  const onPaste = (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    if (canSee) addFiles(files);
    else {
      note = "This model takes no images.";
      update();
    }
  };
  const running = pathTo(chat).find((node) => node.isRunning);
  return html`<form class="composer" @submit=${send}>
    ${note ? html`<p class="problem" role="alert">${note}</p>` : nothing}
    ${draft.images.length ? html`<div class="row">${draft.images.map((url, index) => html`<span class="thumb"><img src=${url} alt="Image ${index + 1}">
      <button type="button" class="quiet small" aria-label="Remove image ${index + 1}" @click=${() => { draft.images.splice(index, 1); update(); }}>✕</button></span>`)}</div>` : nothing}
    <label for="prompt" class="visually-hidden">Message</label>
    <textarea id="prompt" rows="3" placeholder="Write a message" .value=${live(draft.text)} @paste=${onPaste}
      @input=${(event) => { draft.text = event.target.value; update(); }}
      @keydown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); }}></textarea>
    <div class="row">
      <span class="hint muted">Enter sends, Shift+Enter starts a line, Escape stops</span>
      <span class="spacer"></span>
      ${canSee ? html`<label class="button quiet" tabindex="-1">Image<input class="visually-hidden" type="file" accept="image/png,image/jpeg,image/gif,image/webp" multiple @change=${(event) => { addFiles(event.target.files); event.target.value = ""; }}></label>` : nothing}
      ${running ? html`<button type="button" class="stop" @click=${() => stop(running)}>Stop</button>`
        : html`<button ?disabled=${(!draft.text.trim() && !draft.images.length) || !chat.model}>Send</button>`}
    </div>
  </form>`;
}

const takesImages = (name) => detailsOf(name)?.media?.includes("image") ?? false;

function settings(chat) {
  const tools = parsed(chat.tools);
  const schema = parsed(chat.schema);
  const schemaProblem = schema.problem || (schema.value === undefined ? "" : problemOfSchema(schema.value));
  const set = (name) => (event) => { chat[name] = event.target.value; keep(chat); update(); };
  const canRecord = takes(chat.model, "token_details") && takes(chat.model, "logprobs");
  return html`<aside class="settings" aria-label="Settings of this chat">
    <h2>Settings of this chat</h2>
    <div class="field"><label for="system">System text</label>
      <textarea id="system" rows="3" .value=${live(chat.system)} @input=${set("system")}></textarea></div>
    <label class="check"><input type="checkbox" .checked=${live(chat.records && canRecord)} ?disabled=${!canRecord}
      @change=${(event) => { chat.records = event.target.checked; keep(chat); update(); }}>
      Record each token for Inspect${canRecord ? "" : " (refused by this model)"}</label>
    <details><summary>Tools${Array.isArray(tools.value) && tools.value.length ? ` (${tools.value.length})` : ""}</summary>
      <div class="field"><label for="tools">Functions, as in the field <code>tools</code></label>
        <textarea id="tools" class="code" rows="6" spellcheck="false" aria-describedby="tools-state" aria-invalid=${tools.problem ? "true" : "false"} .value=${live(chat.tools)} @input=${set("tools")}></textarea>
        <p class="about" id="tools-state">${tools.problem ? html`<strong class="bad">${tools.problem}</strong>` : "You run a call yourself and paste its result."}</p></div>
      <button type="button" class="quiet small" @click=${() => { chat.tools = JSON.stringify(DEMO_TOOLS, null, 2); keep(chat); update(); }}>Use the demo clock and calculator</button>
    </details>
    <details><summary>JSON Schema${chat.schema.trim() ? (schemaProblem ? ", not valid" : ", valid") : ""}</summary>
      <div class="field"><label for="schema">The answer follows this schema</label>
        <textarea id="schema" class="code" rows="8" spellcheck="false" aria-describedby="schema-state" aria-invalid=${schemaProblem ? "true" : "false"} .value=${live(chat.schema)} @input=${set("schema")}></textarea>
        <p class="about" id="schema-state" role="status">${!chat.schema.trim() ? "Empty: free text." : schemaProblem ? html`<strong class="bad">✕ ${schemaProblem}</strong>` : "✓ A valid schema."}</p></div>
    </details>
    <h3>Parameters</h3>
    ${parameterForm(chat, chat.model, { onChange: () => keep(chat) })}
    ${codeOf(chat)}
  </aside>`;
}

function codeOf(chat) {
  const makers = { curl: asCurl, openai: asOpenAI, anthropic: asAnthropic };
  const path = pathTo(chat);
  const body = bodyOf(chat, path.at(-1)?.role === "assistant" ? path.at(-1).parent : chat.leaf);
  if (!body.messages.some((one) => one.role === "user")) body.messages.push({ role: "user", content: draft.text || "Hello" });
  const text = makers[asWhat](body);
  return html`<details class="as-code"><summary>This request as code</summary>
    <div class="row" role="group" aria-label="Client">${Object.keys(makers).map((name) => html`<button type="button" class="quiet small" aria-pressed=${name === asWhat ? "true" : "false"} @click=${() => { asWhat = name; update(); }}>${name}</button>`)}
      <span class="spacer"></span>${copyButton(() => text)}</div>
    <pre tabindex="0" role="region" aria-label="Code">${text}</pre></details>`;
}

function list(chat) {
  return html`<details class="chats"><summary>Chats (${chats.list.length})</summary>
    ${chats.list.length ? html`<ul>${repeat(chats.list, (one) => one.id, (one) => html`<li>
        <button type="button" class="quiet ${one.id === chat.id ? "is-open" : ""}" aria-current=${one.id === chat.id ? "true" : "false"} @click=${() => openChat(one.id)}>${one.title || "Untitled"}</button>
        <button type="button" class="quiet small" aria-label="Delete the chat ${one.title}" @click=${() => { runningIn(one.id).forEach(stop); forget(one.id); }}>✕</button></li>`)}</ul>`
      : html`<p class="muted">Chats are kept in this browser only.</p>`}
    <div class="row">
      <button type="button" class="quiet small" ?disabled=${!chat.leaf} @click=${() => exportChat(chat)}>Export this chat</button>
      <label class="button quiet small">Import<input class="visually-hidden" type="file" accept="application/json" @change=${importFile}></label>
    </div></details>`;
}

function exportChat(chat) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(chat, null, 1)], { type: "application/json" }));
  link.download = `chat-${chat.created}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function importFile(event) {
  try {
    importChat(await event.target.files[0].text());
    note = "";
  } catch (error) {
    note = error.message;
  }
  event.target.value = "";
  update();
}

const EXAMPLES = ["Explain what a KV cache is in three sentences.", "Write a haiku about a slow network.", "List five primes as JSON."];

function start(chat) {
  return html`<div class="empty"><h2>Ask ${chat.model || "a model"}</h2>
    <p>The answer streams here. Inspect shows it token by token: alternatives, what was cached, and why.</p>
    <div class="row examples">${EXAMPLES.map((text) => html`<button type="button" class="quiet" @click=${() => { draft.text = text; update(); document.getElementById("prompt").focus(); }}>${text}</button>`)}</div></div>`;
}

export const chatView = {
  title: "Chat",
  onEscape: () => stopAll() > 0,
  render() {
    const chat = chats.open;
    if (!chat || !state.modelsRead) return html`<p class="muted">Reading the models…</p>`;
    chosenModel(chat);
    const model = modelOf(chat.model);
    const path = pathTo(chat);
    return html`<div class="chat ${isSettingsOpen ? "with-settings" : ""}">
      <section class="conversation" aria-label="Conversation">
        <div class="row bar">${picker(chat)}<span class="spacer"></span>
          <button type="button" class="quiet" @click=${() => showChat(newChat(chat))}>New chat</button>
          <button type="button" class="quiet" aria-expanded=${isSettingsOpen ? "true" : "false"} @click=${() => { isSettingsOpen = !isSettingsOpen; update(); }}>Settings</button></div>
        ${list(chat)}
        ${chats.problem ? problem(chats.problem) : nothing}
        ${model?.error ? problem(`${model.id} cannot be used: ${model.error}`) : nothing}
        ${modelNames().length ? nothing : problem("This server has no model that generates text. Add one to the configuration, or start it with `enginehouse serve`.")}
        <div class="log" role="log" aria-live="off" aria-label="Messages">
          ${path.length ? repeat(path, (node) => node.id, (node) => message(chat, node)) : start(chat)}
        </div>
        ${composer(chat)}
      </section>
      ${isSettingsOpen ? settings(chat) : nothing}
    </div>`;
  },
};
