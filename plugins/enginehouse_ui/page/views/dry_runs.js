// Routing and Compression: what would be chosen, and what would be cut, without an answer.
import { html, nothing, svg } from "../vendor/lit-html/lit-html.js";
import { live } from "../vendor/lit-html/directives/live.js";
import { post } from "../lib/api.js";
import { count, milliseconds, number, problem } from "../lib/parts.js";
import { modelNames, noteError, readSchema, state, update } from "../lib/state.js";

const routing = { text: "", model: "auto", answer: null, failure: "", isBusy: false };
const compression = { text: "", model: "", method: "", ratio: "0.5", answer: null, sent: "", failure: "", isBusy: false };

function submit(form, address, body) {
  return async (event) => {
    event.preventDefault();
    form.isBusy = true;
    update();
    try {
      form.answer = await post(address, body());
      form.sent = form.text;
      form.failure = "";
    } catch (error) {
      form.answer = null;
      form.failure = noteError(error);
    }
    form.isBusy = false;
    update();
  };
}

const messages = (text) => [{ role: "user", content: text }];

function textField(form, id, label) {
  return html`<div class="field"><label for=${id}>${label}</label><textarea id=${id} rows="8" required .value=${live(form.text)} @input=${(event) => { form.text = event.target.value; update(); }}></textarea></div>`;
}

function bar(value) {
  return svg`<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect class="rail" width="100" height="8"/><rect class="part" width=${100 * Math.max(0, Math.min(1, value))} height="8"/></svg>`;
}

function route(found) {
  const features = Object.entries(found.features);
  return html`<section aria-label="Result" aria-live="polite"><h2>${found.model}</h2><p>${found.reason}${found.strategy ? `; strategy ${found.strategy}, decided in ${milliseconds(found.decision_ms)}` : ""}.
      ${found.attempts.length > 1 ? `If it fails before its first token: ${found.attempts.slice(1).join(", then ")}.` : ""}</p>
    ${found.candidates.length ? html`<div class="wide" tabindex="0" role="region" aria-label="Candidates"><table class="lines"><caption>Candidates</caption><thead><tr><th scope="col">Model</th><th scope="col">Score</th><th scope="col">State</th><th scope="col" class="num">Running / waiting</th><th scope="col">First token</th></tr></thead><tbody>
      ${found.candidates.map((one) => html`<tr class=${one.model === found.model ? "is-chosen" : ""}><th scope="row">${one.model}${one.model === found.model ? html` <span class="muted">chosen</span>` : nothing}</th>${one.refused ? html`<td colspan="4">Left out: ${one.refused}</td>` : html`<td>${one.score === null ? "–" : html`${bar(one.score)} ${number(one.score, 3)}`}</td><td>${one.state}${one.has_failed ? ", failed lately" : ""}</td><td class="num">${one.num_running} / ${one.num_waiting}</td><td>${milliseconds(one.first_token_ms)}</td>`}</tr>`)}</tbody></table></div>` : nothing}
    ${features.length ? html`<table><caption>What the router saw in the prompt</caption><thead><tr><th scope="col">Feature</th><th scope="col">Value</th></tr></thead><tbody>${features.map(([name, value]) => html`<tr><th scope="row">${name}</th><td>${bar(value)} ${number(value, 3)}</td></tr>`)}</tbody></table>` : nothing}
  </section>`;
}

export const routingView = {
  title: "Routing",
  render() {
    const names = ["auto", ...modelNames().filter((name) => name !== "auto")];
    return html`<div class="page"><p class="muted">Which models a chat would be tried on, and why. Nothing is generated.</p>
      <form @submit=${submit(routing, "v1/route", () => ({ model: routing.model, messages: messages(routing.text) }))}>
        <div class="field narrow"><label for="route-model">Requested model</label><select id="route-model" @change=${(event) => { routing.model = event.target.value; update(); }}>${names.map((name) => html`<option value=${name} ?selected=${name === routing.model}>${name}</option>`)}</select></div>
        ${textField(routing, "route-text", "Prompt")}
        <button ?disabled=${routing.isBusy || !routing.text.trim()}>Show the route</button></form>
      ${problem(routing.failure)}${routing.answer ? route(routing.answer) : nothing}</div>`;
  },
};

/** The text in parts, with what was cut marked as deleted text. */
function difference(text, { parts, kept }) {
  if (!parts?.length && !kept?.length) return html`<span>${text}</span>`;
  const found = [];
  let at = 0;
  for (const part of parts) {
    if (part.start > at) found.push(html`<span>${text.slice(at, part.start)}</span>`);
    const title = `${part.reason}${part.score === null ? "" : `, ${part.score}`}`;
    const piece = text.slice(part.start, part.end);
    found.push(part.kept ? html`<span title=${title}>${piece}</span>` : html`<del title=${title}>${piece}</del>`);
    at = part.end;
  }
  found.push(html`<span>${text.slice(at)}</span>`);
  return found;
}

function compressed(found, sent) {
  const result = found.compression;
  if (!result) return html`<section aria-live="polite"><p>Nothing would be cut: this model compresses no prompts, and the form names no method.</p></section>`;
  const saved = result.tokens_before ? 1 - result.tokens_after / result.tokens_before : 0;
  return html`<section aria-label="Result" aria-live="polite"><h2>${result.failed ? "Not changed" : `${count(result.tokens_before)} tokens became ${count(result.tokens_after)}`}</h2>
    <p>${result.failed ?? `${Math.round(100 * saved)} % less, by ${result.method}, in ${milliseconds(result.ms)}${result.scored_tokens ? `; ${count(result.scored_tokens)} tokens were read to score it` : ""}.`}</p>
    ${found.texts.map((one) => html`<p class="legend"><span>kept</span> <del>cut</del></p><div class="prompt" tabindex="0" role="region" aria-label="The prompt with what was cut">${difference(sent, one)}</div>
      ${one.parts.length ? html`<details><summary>Parts and their scores (${one.parts.length})</summary><div class="wide" tabindex="0" role="region" aria-label="Parts and their scores"><table class="lines"><thead><tr><th scope="col">Part</th><th scope="col">Kept</th><th scope="col">Score</th><th scope="col">Why</th></tr></thead><tbody>${one.parts.map((part) => html`<tr><th scope="row" class="long">${sent.slice(part.start, part.end)}</th><td>${part.kept ? "✓ kept" : "✕ cut"}</td><td class="num">${part.score === null ? "–" : number(part.score, 3)}</td><td>${part.reason}</td></tr>`)}</tbody></table></div></details>` : nothing}`)}
    <h3>What the model would read</h3><div class="prompt" tabindex="0" role="region" aria-label="The shortened prompt">${found.messages?.map((one) => one.content) ?? found.prompt}</div></section>`;
}

function methods() {
  const schema = JSON.stringify(state.schema?.Compression?.properties?.method ?? {});
  const listed = /"enum":\[([^\]]*)\]/.exec(schema)?.[1].match(/"([^"]+)"/g)?.map((name) => name.slice(1, -1));
  return listed ?? ["extractive", "lossless", "scored", "semantic"];
}

export const compressionView = {
  title: "Compression",
  enter: readSchema,
  render() {
    const names = modelNames().filter((name) => name !== "auto");
    if (!names.includes(compression.model)) compression.model = names[0] ?? "";
    const body = () => ({
      model: compression.model, messages: messages(compression.text),
      ...(compression.method && { compression: { method: compression.method, ...(compression.ratio && compression.method !== "lossless" && { ratio: Number(compression.ratio) }) } }),
    });
    return html`<div class="page"><p class="muted">What compression would leave of a prompt. Nothing is generated; a paragraph at the end is taken as the question.</p>
      <form @submit=${submit(compression, "v1/compress", body)}>
        <div class="row fields">
          <div class="field"><label for="compress-model">Model</label><select id="compress-model" @change=${(event) => { compression.model = event.target.value; update(); }}>${names.map((name) => html`<option value=${name} ?selected=${name === compression.model}>${name}</option>`)}</select></div>
          <div class="field"><label for="compress-method">Method</label><select id="compress-method" @change=${(event) => { compression.method = event.target.value; update(); }}><option value="">the model's setting</option>${methods().map((name) => html`<option value=${name} ?selected=${name === compression.method}>${name}</option>`)}</select></div>
          <div class="field"><label for="compress-ratio">Ratio to keep</label><input id="compress-ratio" type="number" min="0.01" max="1" step="0.01" .value=${live(compression.ratio)} @input=${(event) => { compression.ratio = event.target.value; }}></div></div>
        ${textField(compression, "compress-text", "Prompt")}
        <button ?disabled=${compression.isBusy || !compression.text.trim()}>Show what would be cut</button></form>
      ${problem(compression.failure)}${compression.answer ? compressed(compression.answer, compression.sent) : nothing}</div>`;
  },
};
