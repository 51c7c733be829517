// Models: states, memory, load and unload, values in force and what each model takes.
import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { repeat } from "../vendor/lit-html/directives/repeat.js";
import { getJson, post, remove, stream } from "../lib/api.js";
import { bytes, count, empty, problem, stateBadge } from "../lib/parts.js";
import { detailsOf, modelOf, noteError, readModels, update } from "../lib/state.js";

let served = null;
let memory = {};
let failure = ""; // of the last action
let canDownload = false; // whether the model that was just refused can be added with its download
let readFailure = "";
let said = "";
const busy = new Set();
const open = new Set();
let filter = "";
let unserved = [];
let isAdding = false;
const added = { source: "", id: "", download: false };

async function read() {
  try {
    const answer = await getJson("admin/models");
    served = answer.data;
    memory = answer.memory;
    unserved = answer.unserved ?? [];
    readFailure = "";
  } catch (error) {
    readFailure = noteError(error);
  }
  update();
}

const READ_AFTER_MS = 200;
let following = null; // AbortController of the stream of events, while this view is shown
let planned = 0;

/** Read again after each event of a model or request, once for several that come together. */
async function follow() {
  if (following) return;
  const mine = new AbortController();
  following = mine;
  try {
    for await (const _ of stream("GET", "admin/events", undefined, { signal: mine.signal }))
      planned ||= setTimeout(() => { planned = 0; read(); }, READ_AFTER_MS);
  } catch (error) {
    if (error.name !== "AbortError") readFailure = noteError(error);
  } finally {
    if (following === mine) following = null; // the next tick connects again
  }
}

function leave() {
  following?.abort();
  following = null;
}

function enter() {
  read();
  follow();
}

/** A source such as owner/name:Q4_K_M, whose files can be downloaded. */
const isHubId = (source) => /^[\w-][\w.-]*\/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?$/.test(source);

function addWithDownload() {
  added.download = true;
  add();
}

const path = (id) => id.split("/").map(encodeURIComponent).join("/");

async function order(model, what, body) {
  busy.add(model.id);
  said = "";
  canDownload = false;
  update();
  try {
    const after = await post(`admin/models/${path(model.id)}/${what}`, body);
    said = after.downloading ? `${model.id} is being downloaded.` : `${model.id} is ${after.state}.`;
    failure = "";
  } catch (error) {
    failure = noteError(error);
  }
  busy.delete(model.id);
  await Promise.all([read(), readModels()]);
}

async function add(event) {
  event?.preventDefault();
  said = "";
  canDownload = false;
  isAdding = true;
  update();
  try {
    const model = await post("admin/models", { source: added.source.trim(), ...(added.id.trim() && { id: added.id.trim() }), download: added.download });
    said = `${model.id} was added; it is ${model.downloading ? "being downloaded" : model.state}.`;
    failure = "";
    Object.assign(added, { source: "", id: "", download: false });
  } catch (error) {
    failure = noteError(error);
    canDownload = error.code === "source_not_found" && isHubId(added.source.trim()) && !added.download;
    if (canDownload) failure = `The files of ${added.source.trim()} are not here.`;
  }
  isAdding = false;
  await Promise.all([read(), readModels()]);
}

async function drop(model) {
  said = "";
  try {
    await remove(`admin/models/${path(model.id)}`);
    said = `${model.id} is no longer served; its files stay.`;
    failure = "";
  } catch (error) {
    failure = noteError(error);
  }
  await Promise.all([read(), readModels()]);
}

function addForm() {
  return html`<details><summary>Add a model</summary><form @submit=${add}>
    <div class="row fields"><div class="field"><label for="add-source">Source</label><input id="add-source" required aria-describedby="add-about" .value=${added.source} @input=${(event) => { added.source = event.target.value; }}></div>
      <div class="field"><label for="add-id">Name (the source's own if empty)</label><input id="add-id" .value=${added.id} @input=${(event) => { added.id = event.target.value; }}></div></div>
    <p class="about" id="add-about">A path in <code>server.models_dir</code>, or a hub id that <code>server.allowed_sources</code> allows. It is served until the server stops.</p>
    <label class="check"><input type="checkbox" .checked=${added.download} @change=${(event) => { added.download = event.target.checked; }}> Download its files if they are not here</label>
    <button ?disabled=${isAdding}>Add</button>${isAdding ? html` <span class="muted" role="status">looking for it…</span>` : nothing}</form></details>`;
}

async function reload() {
  said = "";
  try {
    const report = await post("admin/reload");
    const changes = Object.entries(report.models).filter(([name, names]) => name !== "kept" && names.length)
      .map(([name, names]) => `${name}: ${names.join(", ")}`);
    said = `Read again. ${changes.join("; ") || "No model changed."}${report.needs_restart.length ? ` Only a restart changes ${report.needs_restart.join(", ")}.` : ""}`;
    failure = "";
  } catch (error) {
    failure = noteError(error);
  }
  await Promise.all([read(), readModels()]);
}

function row(model) {
  const isBusy = busy.has(model.id);
  const isOpen = open.has(model.id);
  const canUnload = !model.downloading && ["ready", "loading", "draining", "restarting"].includes(model.state);
  return html`<tr>
      <th scope="row"><button type="button" class="quiet small toggle" aria-expanded=${isOpen ? "true" : "false"} @click=${() => { if (!open.delete(model.id)) open.add(model.id); update(); }}><span aria-hidden="true">${isOpen ? "▾" : "▸"}</span> ${model.id}</button>
        ${model.aliases.length ? html`<br><span class="muted">also ${model.aliases.join(", ")}</span>` : nothing}</th>
      <td>${stateBadge(model)}${model.state === "loading" ? html`<br><progress max="1" .value=${model.progress ?? 0} aria-label="Progress of ${model.id}"></progress>
        <br><span class="muted">${model.progress_text ?? ""}</span>` : nothing}</td>
      <td>${model.backend ?? "–"}<br><span class="muted">${model.backend_reason ?? ""}</span></td>
      <td class="num">${model.memory ? html`${bytes(model.memory.bytes)}<br><span class="muted">${model.memory.device}</span>` : "–"}</td>
      <td class="num">${model.num_running} / ${model.num_waiting}</td>
      <td class="num">${model.num_restarts}</td>
      <td><div class="row">${canUnload
        ? html`<button type="button" class="quiet small" ?disabled=${isBusy} @click=${() => order(model, "unload", { drain: true })}>Unload<span class="visually-hidden"> ${model.id}</span></button>`
        : model.downloading ? nothing : html`<button type="button" class="quiet small" ?disabled=${isBusy} @click=${() => order(model, "load")}>Load<span class="visually-hidden"> ${model.id}</span></button>`}
        ${model.state === "failed" && isHubId(model.source) ? html`<button type="button" class="quiet small" ?disabled=${isBusy} @click=${() => order(model, "download")}>Download<span class="visually-hidden"> ${model.id}</span></button>` : nothing}
        ${model.downloading ? html`<button type="button" class="quiet small" @click=${() => order(model, "cancel-download")}>Stop the download<span class="visually-hidden"> of ${model.id}</span></button>` : nothing}
        ${model.origin === "added" && !model.downloading ? html`<button type="button" class="quiet small" ?disabled=${isBusy} @click=${() => drop(model)}>Remove<span class="visually-hidden"> ${model.id}</span></button>` : nothing}
        ${isBusy ? html`<span class="muted" role="status">working…</span>` : nothing}</div></td>
    </tr>
    ${model.error ? html`<tr class="detail"><td colspan="7">${problem(model.error)}</td></tr>` : nothing}
    ${isOpen ? html`<tr class="detail"><td colspan="7">${detail(model)}</td></tr>` : nothing}`;
}

const SUPPORT = { native: "✓ native", emulated: "✓ emulated", accepted: "– accepted, no effect", refused: "✕ refused" };

function detail(model) {
  const long = detailsOf(model.id);
  const short = modelOf(model.id);
  if (!long) return html`<p class="muted">${short ? "Reading…" : "Nothing is known of this model."}</p>`;
  const facts = [
    ["Task", long.task], ["Input", ["text", ...(long.media ?? [])].join(", ")], ["Context", long.max_context && `${count(long.max_context)} tokens`], ["Quantization", long.quantization],
    ["Loaded", `${model.load}${model.pin ? ", pinned" : ""}${model.ttl ? `, unloaded after ${model.ttl} s idle` : ""}`],
    ["Tool parser", long.parsers?.tools], ["Reasoning parser", long.parsers?.reasoning], ["Fingerprint", long.system_fingerprint],
    ...Object.entries(long.metadata ?? {}),
  ].filter(([, value]) => value);
  const parameters = Object.entries(long.parameters ?? {});
  const capabilities = Object.entries(long.capabilities ?? {}).filter(([name]) => name.includes(filter));
  return html`<div class="detail-body">
    <dl class="facts-list">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${typeof value === "object" ? JSON.stringify(value) : value}</dd></div>`)}</dl>
    ${parameters.length ? html`<details><summary>Values in force (${parameters.length})</summary>
      <table><thead><tr><th scope="col">Parameter</th><th scope="col">Value</th><th scope="col">From</th></tr></thead><tbody>${parameters.map(([name, { value, origin }]) => html`<tr><th scope="row">${name}</th><td><code>${JSON.stringify(value)}</code></td><td>${origin}</td></tr>`)}</tbody></table></details>` : nothing}
    ${long.capabilities ? html`<details><summary>What it takes (${Object.keys(long.capabilities).length})</summary>
      <label class="field"><span>Find a field</span><input type="search" .value=${filter} @input=${(event) => { filter = event.target.value; update(); }}></label>
      <table><thead><tr><th scope="col">Field</th><th scope="col">Support</th><th scope="col">Why</th></tr></thead><tbody>${capabilities.map(([name, { support, reason }]) => html`<tr><th scope="row">${name}</th><td>${SUPPORT[support] ?? support}</td><td>${reason}</td></tr>`)}</tbody></table></details>` : nothing}
  </div>`;
}

export const modelsView = {
  title: "Models",
  isAdmin: true,
  everyMs: 5000,
  enter,
  leave,
  tick: enter,
  render() {
    return html`<div class="page">
      <div class="row bar"><p class="spacer">${Object.entries(memory).map(([device, { held_bytes, budget_bytes }]) => html`<span class="muted">${device}: ${bytes(held_bytes)} held${budget_bytes ? html` of ${bytes(budget_bytes)} <meter min="0" max=${budget_bytes} .value=${held_bytes} aria-label="Memory of ${device}"></meter>` : ""}</span> `)}</p>
        <button type="button" class="quiet" @click=${reload}>Read the configuration again</button></div>
      ${problem(readFailure)}${problem(failure, canDownload ? html`<button type="button" @click=${addWithDownload}>Download them and add the model</button>` : nothing)}
      <p role="status">${said}</p>
      ${!served ? html`<p class="muted">Reading…</p>` : served.length ? html`<div class="wide" tabindex="0" role="region" aria-label="Models"><table class="lines">
        <thead><tr><th scope="col">Model</th><th scope="col">State</th><th scope="col">Backend</th><th scope="col" class="num">Memory</th><th scope="col" class="num">Running / waiting</th><th scope="col" class="num">Restarts</th><th scope="col">Actions</th></tr></thead>
        <tbody>${repeat(served, (model) => model.id, row)}</tbody></table></div>`
        : empty("No models", "The configuration names none.")}
      ${addForm()}
      ${unserved.length ? html`<details><summary>Files that are not served (${unserved.length})</summary><ul>${unserved.map((one) => html`<li>${Object.values(one).filter((value) => typeof value === "string").join(": ")}</li>`)}</ul></details>` : nothing}
    </div>`;
  },
};
