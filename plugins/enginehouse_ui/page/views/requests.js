// Requests: what runs now, with the means to end it. Texts of others are shown only where server.show_prompts allows it.
import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { repeat } from "../vendor/lit-html/directives/repeat.js";
import { getJson, post } from "../lib/api.js";
import { count, empty, milliseconds, problem } from "../lib/parts.js";
import { noteError, update } from "../lib/state.js";

let running = null;
let failure = ""; // of the last action
let readFailure = "";
let said = "";
let opened = null;
let partial = null;

async function read() {
  try {
    running = (await getJson("admin/requests")).data;
    readFailure = "";
    if (opened) partial = await getJson(`admin/requests/${opened}`).catch(() => null);
  } catch (error) {
    readFailure = noteError(error);
  }
  update();
}

async function order(request, what, done) {
  try {
    await post(`admin/requests/${request.id}/${what}`);
    said = `${request.id}: ${done}.`;
    failure = "";
  } catch (error) {
    failure = error.status === 404 ? "" : noteError(error);
    if (error.status === 404) said = `${request.id} has ended.`;
  }
  await read();
}

function row(request) {
  const isThinking = request.choices.some((choice) => choice.is_thinking);
  const isOpen = opened === request.id;
  return html`<tr>
      <th scope="row"><button type="button" class="quiet small toggle" aria-expanded=${isOpen ? "true" : "false"} @click=${() => { opened = isOpen ? null : request.id; partial = null; read(); }}><span aria-hidden="true">${isOpen ? "▾" : "▸"}</span> <code>${request.id}</code></button></th>
      <td>${request.phase}${request.client_gone ? ", client gone" : ""}</td><td>${request.model}</td><td>${request.key ?? "–"}</td>
      <td class="num">${milliseconds(1000 * (request.age_s ?? 0))}</td>
      <td class="num">${count(request.prompt_tokens)} / ${count(request.cached_tokens)}</td><td class="num">${count(request.choices.reduce((sum, choice) => sum + (choice.completion_tokens ?? 0), 0))}</td>
      <td><div class="row"><button type="button" class="quiet small" @click=${() => order(request, "cancel", "cancelled")}>Cancel<span class="visually-hidden"> ${request.id}</span></button>
        ${isThinking ? html`<button type="button" class="quiet small" @click=${() => order(request, "stop-thinking", "its thinking was ended")}>Stop thinking</button>` : nothing}</div></td></tr>
    ${isOpen ? html`<tr class="detail"><td colspan="8"><pre tabindex="0" role="region" aria-label="Details of the request">${partial ? JSON.stringify(partial, null, 2) : "It has ended, or is being read."}</pre></td></tr>` : nothing}`;
}

export const requestsView = {
  title: "Requests",
  isAdmin: true,
  everyMs: 1000,
  enter: read,
  tick: read,
  render() {
    return html`<div class="page">
      ${problem(readFailure)}${problem(failure)}
      <p role="status">${said}</p>
      ${!running ? html`<p class="muted">Reading…</p>` : running.length ? html`<div class="wide" tabindex="0" role="region" aria-label="Running requests"><table class="lines">
        <thead><tr><th scope="col">Request</th><th scope="col">Phase</th><th scope="col">Model</th><th scope="col">Caller</th><th scope="col" class="num">Age</th><th scope="col" class="num">Prompt / cached</th><th scope="col" class="num">Completion</th><th scope="col">Actions</th></tr></thead>
        <tbody>${repeat(running, (request) => request.id, row)}</tbody></table></div>`
        : empty("Nothing is running", "Requests appear here while the server works on them.")}
    </div>`;
  },
};
