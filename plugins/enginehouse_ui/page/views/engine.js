// Engine: slots, KV cache and prefix cache of each model, and charts of the last 15 minutes, kept in this browser.
import { html, nothing, svg } from "../vendor/lit-html/lit-html.js";
import { getJson, getText, parseMetrics } from "../lib/api.js";
import { bytes, count, empty, number, problem } from "../lib/parts.js";
import { noteError, state, update } from "../lib/state.js";

const EVERY_MS = 2000;
const MOST = (15 * 60_000) / EVERY_MS;

let models = null;
let failure = "";
let model = "";
const samples = []; // {time (s), values: Map of "name|model" to number}
let timer = 0;

async function read() {
  try {
    const [slots, text] = await Promise.all([getJson("admin/slots"), getText("metrics")]);
    models = slots.data;
    const values = new Map();
    for (const { name, labels, value } of parseMetrics(text)) {
      const key = `${name.replace("enginehouse_", "")}|${labels.model ?? ""}`;
      values.set(key, (values.get(key) ?? 0) + value);
    }
    samples.push({ time: Date.now() / 1000, values });
    if (samples.length > MOST) samples.shift();
    failure = "";
  } catch (error) {
    failure = noteError(error);
  }
  update();
}

function begin() {
  read();
  // From the first visit on, also while another view is shown: charts without gaps.
  timer ||= setInterval(() => document.hidden || read(), EVERY_MS);
}

const at = (sample, name) => sample.values.get(`${name}|${model}`) ?? null;
const level = (name) => () => samples.map((sample) => at(sample, name));

/** Change per second between samples; a counter that fell has begun anew. */
const rate = (name) => () =>
  samples.map((sample, index) => {
    const before = samples[index - 1];
    if (!before || at(sample, name) === null) return null;
    return Math.max(0, at(sample, name) - (at(before, name) ?? 0)) / Math.max(0.1, sample.time - before.time);
  });

/** Mean of a histogram between samples, in milliseconds; null where nothing was counted. */
const mean = (name) => () =>
  samples.map((sample, index) => {
    const before = samples[index - 1];
    if (!before) return null;
    const num = at(sample, `${name}_count`) - at(before, `${name}_count`);
    return num > 0 ? (1000 * (at(sample, `${name}_sum`) - at(before, `${name}_sum`))) / num : null;
  });

const share = () =>
  samples.map((sample) => {
    const all = at(sample, "kv_cache_tokens");
    return all ? 100 * (1 - at(sample, "kv_cache_free_tokens") / all) : null;
  });

const CHARTS = [
  { title: "Tokens per second", unit: "", series: [["prompt", rate("prompt_tokens_total")], ["completion", rate("completion_tokens_total")]] },
  { title: "Requests", unit: "", series: [["running sequences", level("running_sequences")], ["waiting", level("waiting_requests")]] },
  { title: "Mean times", unit: "ms", series: [["first token", mean("time_to_first_token_seconds")], ["between tokens", mean("inter_token_seconds")]] },
  { title: "KV cache in use", unit: "%", series: [["in use", share]] },
  { title: "Drafts per second", unit: "", series: [["drafted", rate("drafted_tokens_total")], ["accepted", rate("accepted_draft_tokens_total")]] },
  { title: "Worker memory", unit: "MB", series: [["memory", () => level("worker_memory_bytes")().map((value) => value && value / 1e6)]] },
];

/** <time-chart .data=${{times, series, unit}}>: uPlot, loaded when the first chart is drawn. */
class TimeChart extends HTMLElement {
  #plot = null;
  #data = null;
  #observer = new ResizeObserver(() => this.#plot?.setSize({ width: this.clientWidth, height: 150 }));

  set data(data) {
    this.#data = data;
    if (this.#plot) this.#plot.setData(this.#columns());
    else this.#make();
  }

  #columns() {
    return [this.#data.times, ...this.#data.series.map(([, values]) => values)];
  }

  async #make() {
    const { default: UPlot } = await import("../vendor/uplot/uPlot.esm.js");
    if (this.#plot || !this.isConnected) return;
    const style = getComputedStyle(this); // live: colours follow the theme
    const color = (name) => () => style.getPropertyValue(name);
    const axis = { stroke: () => style.color, grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const clock = (_, times) => times.map((time) => new Date(1000 * time).toTimeString().slice(0, 5));
    const options = {
      width: this.clientWidth || 300, height: 150, legend: { show: false }, cursor: { show: false },
      scales: { x: { range: () => [Date.now() / 1000 - 900, Date.now() / 1000] }, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.1] } },
      axes: [{ ...axis, size: 30, values: clock, incrs: [180, 300] }, { ...axis, size: 48 }],
      series: [{}, ...this.#data.series.map((_, index) => ({ stroke: color(`--line-${index}`), width: 2, dash: index ? [6, 4] : undefined, spanGaps: true, points: { show: false } }))],
    };
    this.#plot = new UPlot(options, this.#columns(), this);
    this.#observer.observe(this);
  }

  disconnectedCallback() {
    this.#observer.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }
}
customElements.define("time-chart", TimeChart);

function chart({ title, unit, series }) {
  const drawn = series.map(([name, values]) => [name, values()]);
  if (!drawn.some(([, values]) => values.some((value) => value !== null))) return nothing;
  const last = (values) => values.findLast((value) => value !== null);
  const text = drawn.map(([name, values]) => `${name} ${number(last(values))}${unit && ` ${unit}`}`);
  return html`<figure class="chart"><figcaption><strong>${title}</strong>
      ${text.map((one, index) => html`<span><svg class="key" viewBox="0 0 20 4" aria-hidden="true"><line class="line${index}" x1="0" y1="2" x2="20" y2="2"/></svg> ${one}</span>`)}</figcaption>
    <time-chart role="img" aria-label=${`${title}: ${text.join(", ")}`} .data=${{ times: samples.map((one) => one.time), series: drawn, unit }}></time-chart></figure>`;
}

function slots(one) {
  if (!one.inspectable) return html`<p class="muted">The backend of this model does not show its slots.</p>`;
  if (one.slots === null) return html`<p class="muted">The engine is in a long step; it is shown after that.</p>`;
  const used = one.cache_tokens - one.free_tokens;
  const most = Math.max(1, one.cache_tokens);
  return html`
    <dl class="facts-list">
      <div><dt>Slots</dt><dd>${one.slots_in_use} of ${one.slots} in use</dd></div>
      <div><dt>Waiting</dt><dd>${one.requests_waiting}</dd></div>
      <div><dt>KV cache</dt><dd>${count(used)} of ${count(one.cache_tokens)} positions <meter min="0" max=${most} .value=${used} aria-label="KV cache in use"></meter></dd></div>
      <div><dt>Restarts</dt><dd>${state.models.find((other) => other.id === one.model)?.num_restarts ?? "–"}</dd></div>
    </dl>
    <div class="columns"><section aria-label="Sequences"><h2>Sequences</h2>${one.sequences.length ? html`<div class="wide" tabindex="0" role="region" aria-label="Running sequences"><table><thead><tr><th scope="col">Request</th><th scope="col">Phase</th><th scope="col">KV positions</th></tr></thead><tbody>
        ${one.sequences.map((sequence) => html`<tr><th scope="row"><code>${sequence.request_id.slice(0, 18)}</code></th><td>${sequence.phase}</td><td>${svg`<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect class="rail" width="100" height="8"/><rect class="part" width=${(100 * sequence.kv_tokens) / most} height="8"/></svg>`} ${count(sequence.kv_tokens)}</td></tr>`)}</tbody></table></div>` : html`<p class="muted">No sequence runs.</p>`}</section>
      <section aria-label="Prefix cache"><h2>Prefix cache</h2>${one.prefixes.length ? html`<div class="wide" tabindex="0" role="region" aria-label="Cached prefixes"><table><thead><tr><th scope="col">Tokens</th><th scope="col" class="num">Hits</th><th scope="col">Namespace</th></tr></thead><tbody>
        ${one.prefixes.slice(0, 50).map((prefix) => html`<tr><th scope="row">${count(prefix.tokens)}</th><td class="num">${count(prefix.hits)}</td><td>${prefix.namespace || (prefix.salt_hash ? html`<code>${prefix.salt_hash}</code>` : "shared by all")}</td></tr>`)}</tbody></table></div>` : html`<p class="muted">Nothing is cached.</p>`}</section></div>`;
}

export const engineView = {
  title: "Engine",
  isAdmin: true,
  enter: begin,
  render() {
    if (!models && !failure) return html`<p class="muted">Reading…</p>`;
    const names = (models ?? []).map((one) => one.model);
    if (!names.length) return html`<div class="page">${problem(failure)}${failure ? nothing : empty("No engine runs", "Load a model; its slots and caches appear here.")}</div>`;
    if (!names.includes(model)) model = names[0];
    const server = samples.at(-1)?.values.get("server_memory_bytes|");
    const charts = CHARTS.map(chart).filter((one) => one !== nothing);
    return html`<div class="page">${problem(failure)}
      <div class="row bar"><div class="field narrow"><label for="engine-model">Model</label><select id="engine-model" @change=${(event) => { model = event.target.value; update(); }}>${names.map((name) => html`<option value=${name} ?selected=${name === model}>${name}</option>`)}</select></div>
        <span class="spacer"></span><span class="muted">Server process: ${bytes(server)}</span></div>
      ${slots(models.find((one) => one.model === model))}
      <h2>Last 15 minutes</h2>
      <p class="muted">Kept in this browser since this view was first opened; the server keeps no history.</p>
      ${charts.length ? html`<div class="charts">${charts}</div>` : html`<p class="muted">This model reports no figures yet.</p>`}
    </div>`;
  },
};
