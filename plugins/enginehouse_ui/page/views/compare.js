// Compare: one prompt on two to four models or parameters, with the first difference, speed and cost.
import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { live } from "../vendor/lit-html/directives/live.js";
import { fill, stop, takes } from "../lib/generate.js";
import { copyButton, milliseconds, number, plural, problem } from "../lib/parts.js";
import { modelNames, state, update } from "../lib/state.js";
import { parameterForm } from "./parameters.js";

const columns = [{ model: "", parameters: {}, node: null }, { model: "", parameters: { temperature: 0 }, node: null }];
let text = "";
let seed = "1";

const isRunning = () => columns.some((column) => column.node?.isRunning);

function run(event) {
  event.preventDefault();
  for (const column of columns) {
    const body = {
      model: column.model, messages: [{ role: "user", content: text }], ...(seed && { seed: Number(seed) }), ...column.parameters,
      stream: true, stream_options: { include_usage: true },
    };
    if (takes(column.model, "logprobs")) Object.assign(body, { logprobs: true, top_logprobs: 0 });
    column.node = { model: column.model, content: "", reasoning: "", calls: [], tokens: [], request: body };
    fill(column.node, body);
  }
  update();
}

/** Number of characters that all answers begin with. */
function common(texts) {
  let length = 0;
  while (texts.every((one) => length < one.length && one[length] === texts[0][length])) length += 1;
  return length;
}

function shown(column, numCommon) {
  const node = column.node;
  if (!node) return nothing;
  const usage = node.usage;
  const rows = [
    ["First token", milliseconds(node.details?.timings_ms?.first_token ?? node.firstMs)],
    ["Decode", node.details?.tokens_per_second?.decode ? `${number(node.details.tokens_per_second.decode)} tokens/s` : "–"],
    ["Answer", usage ? plural(usage.completion_tokens, "token") : "–"],
    ["Thinking", usage ? plural(usage.completion_tokens_details?.reasoning_tokens ?? 0, "token") : "–"],
    ["Perplexity", node.tokens.length ? number(Math.exp(-node.tokens.reduce((sum, one) => sum + one.logprob, 0) / node.tokens.length), 2) : "–"],
  ];
  const differs = numCommon < node.content.length;
  return html`<div class="compared" aria-busy=${node.isRunning ? "true" : "false"} tabindex="0" role="region" aria-label="Answer of ${column.model}"><span class="same">${node.content.slice(0, numCommon)}</span>${differs ? html`<mark>${node.content.slice(numCommon, numCommon + 1)}</mark>${node.content.slice(numCommon + 1)}` : nothing}</div>
    ${node.isRunning ? html`<p class="muted"><span class="pulse" aria-hidden="true"></span>${node.stalled || "Writing"}</p>` : nothing}
    ${node.error ? problem(node.error.message) : nothing}
    <table><caption class="visually-hidden">Figures of ${column.model}</caption><tbody>${rows.map(([name, value]) => html`<tr><th scope="row">${name}</th><td class="num">${value}</td></tr>`)}</tbody></table>`;
}

function report() {
  return JSON.stringify(columns.map(({ node }) => ({ request: node?.request, text: node?.content, usage: node?.usage, timings_ms: node?.details?.timings_ms })), null, 2);
}

export const compareView = {
  title: "Compare",
  onEscape: () => columns.filter(({ node }) => node?.isRunning).map(({ node }) => stop(node)).length > 0,
  render() {
    const names = modelNames();
    if (!state.modelsRead) return html`<p class="muted">Reading the models…</p>`;
    for (const [index, column] of columns.entries()) if (!names.includes(column.model)) column.model = names[Math.min(index, names.length - 1)] ?? "";
    const done = columns.filter(({ node }) => node && !node.error);
    const numCommon = done.length > 1 ? common(done.map(({ node }) => node.content)) : Infinity;
    const isAll = done.length > 1 && done.length === columns.length && !isRunning();
    return html`<div class="page wide-page">
      <form @submit=${run}><div class="field"><label for="compare-text">Prompt</label><textarea id="compare-text" rows="3" required .value=${live(text)} @input=${(event) => { text = event.target.value; update(); }}></textarea></div>
        <div class="row"><div class="field narrow"><label for="compare-seed">Seed of all</label><input id="compare-seed" type="number" step="1" .value=${live(seed)} @input=${(event) => { seed = event.target.value; }}></div><span class="spacer"></span>
          <button type="button" class="quiet" ?disabled=${columns.length > 3} @click=${() => { columns.push({ model: names[0] ?? "", parameters: {}, node: null }); update(); }}>Add a column</button>
          ${done.length ? copyButton(report, "Copy as JSON") : nothing}
          ${isRunning() ? html`<button type="button" class="stop" @click=${compareView.onEscape}>Stop</button>` : html`<button ?disabled=${!text.trim() || !names.length}>Compare</button>`}</div></form>
      <p role="status">${!isAll ? "" : done.every(({ node }) => node.content === done[0].node.content) ? "All answers are the same." : `The answers differ from character ${numCommon + 1} on; it is marked.`}</p>
      <div class="compare">${columns.map((column, index) => html`<section class="column" aria-label="Column ${index + 1}">
        <div class="row"><div class="field"><label for="compare-model-${index}">Model ${index + 1}</label><select id="compare-model-${index}" @change=${(event) => { column.model = event.target.value; update(); }}>${names.map((name) => html`<option value=${name} ?selected=${name === column.model}>${name}</option>`)}</select></div>
          ${columns.length > 2 ? html`<button type="button" class="quiet small" aria-label="Remove column ${index + 1}" @click=${() => { columns.splice(index, 1); update(); }}>✕</button>` : nothing}</div>
        <details><summary>Parameters (${Object.keys(column.parameters).length} set)</summary>${parameterForm(column, column.model, { id: `compare${index}` })}</details>
        ${shown(column, numCommon)}</section>`)}</div></div>`;
  },
};
