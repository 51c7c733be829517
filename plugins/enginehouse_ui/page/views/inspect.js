// Inspect: one answer token by token, its prompt with the cached part, its times, and why it was served as it was.
import { html, nothing, svg } from "../vendor/lit-html/lit-html.js";
import { post } from "../lib/api.js";
import { addNode, chats, keep, pathTo } from "../lib/chats.js";
import { answer, bodyOf } from "../lib/generate.js";
import { count, empty, milliseconds, number, problem } from "../lib/parts.js";
import { noteError, update } from "../lib/state.js";

const CHUNK = 200; // tokens that the browser lays out together, when they come into view
let shown = null; // {chat, node, prompt, promptError, chosen}
let drawn = null; // the tokens of a finished answer are drawn once: {node, template}

/** Choose the answer that the view shows. */
export function inspect(chat, node) {
  shown = { chat, node, prompt: null, promptError: "", chosen: -1 };
  drawn = null;
  readPrompt(shown);
}

async function readPrompt(view) {
  const { chat, node } = view;
  const body = bodyOf(chat, node.parent);
  const fields = ["messages", "tools", "tool_choice", "enable_thinking", "reasoning_effort", "chat_template_kwargs"];
  const asked = Object.fromEntries(fields.filter((name) => body[name] !== undefined).map((name) => [name, body[name]]));
  try {
    const model = node.details?.model ?? node.servedBy ?? chat.model;
    view.prompt = await post("tokenize", { model, ...asked, with_pieces: true });
  } catch (error) {
    view.promptError = noteError(error);
  }
  update();
}

const STEPS = [0.9, 0.6, 0.3, 0.1, 0];

/** 1 is likely, 5 is unlikely. */
const stepOf = (logprob) => STEPS.findIndex((least) => Math.exp(logprob) >= least) + 1;
const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100 %" : value < 0.1 ? "below 0.1 %" : `${value.toFixed(1)} %`;
};
const visible = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");

function marksOf(token) {
  return [
    token.forced && "forced by the constraint",
    token.draft && `drafted by ${token.draft}`,
    token.exit != null && `left after layer ${token.exit}`,
    token.resumed && "after an interruption",
    token.thinking && "thinking",
  ].filter(Boolean);
}

function choose(index, moves) {
  if (index < 0 || index >= shown.node.tokens.length) return;
  const region = document.getElementById("tokens");
  region.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
  region.querySelector('[aria-pressed="true"]')?.setAttribute("aria-pressed", "false");
  const button = region.querySelector(`[data-at="${index}"]`);
  button.tabIndex = 0;
  button.setAttribute("aria-pressed", "true");
  if (moves) button.focus();
  shown.chosen = index;
  update();
}

function onKey(event) {
  const at = Number(event.target.dataset.at);
  if (Number.isNaN(at)) return;
  const last = shown.node.tokens.length - 1;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  choose(Math.max(0, Math.min(last, to)), true);
}

function tokenButtons(node) {
  if (drawn?.node === node && drawn.length === node.tokens.length) return drawn.template;
  const chunks = [];
  for (let start = 0; start < node.tokens.length; start += CHUNK) {
    chunks.push(html`<span class="chunk">${node.tokens.slice(start, start + CHUNK).map((token, offset) => {
      const at = start + offset;
      const marks = [token.forced && "F", token.draft && "D", token.exit != null && "E", token.resumed && "R"].filter(Boolean);
      return html`<button type="button" class="token p${stepOf(token.logprob)} ${token.thinking ? "is-thinking" : ""}" data-at=${at} tabindex=${at ? -1 : 0} aria-pressed="false"
        >${visible(token.text)}${marks.length ? html`<sup>${marks.join("")}</sup>` : nothing}</button>${token.text.includes("\n") ? html`<br>` : nothing}`;
    })}</span>`);
  }
  drawn = { node, length: node.tokens.length, template: html`${chunks}` };
  return drawn.template;
}

function tokenPanel() {
  const token = shown.node.tokens[shown.chosen];
  if (!token) return html`<p class="muted">Choose a token; the arrow keys walk from one to the next.</p>`;
  const listed = token.top.some(([text]) => text === token.text) ? token.top : [...token.top, [token.text, token.logprob]];
  return html`<h3>Token ${shown.chosen + 1}: <code>${visible(token.text)}</code></h3>
    <p>${percent(token.logprob)}, log-probability ${number(token.logprob, 3)}${marksOf(token).map((mark) => html` · <strong>${mark}</strong>`)}</p>
    <div class="wide" tabindex="0" role="region" aria-label="Alternatives"><table><caption class="visually-hidden">Alternatives</caption><thead><tr><th scope="col">Token</th><th scope="col">Probability</th><th scope="col" class="num">Log</th><th scope="col"><span class="visually-hidden">Action</span></th></tr></thead>
      <tbody>${listed.map(([text, logprob]) => html`<tr class=${text === token.text ? "is-chosen" : ""}><th scope="row"><code>${visible(text)}</code>${text === token.text ? html` <span class="muted">chosen</span>` : nothing}</th>
        <td>${bar(Math.exp(logprob))} ${percent(logprob)}</td><td class="num">${number(logprob, 3)}</td>
        <td>${text === token.text ? nothing : html`<button type="button" class="quiet small" @click=${() => goOnWith(text)}>Go on with this</button>`}</td></tr>`)}</tbody></table></div>`;
}

function bar(share) {
  return svg`<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect class="rail" width="100" height="8"/><rect class="part" width=${Math.max(1, 100 * share)} height="8"/></svg>`;
}

/** Another branch: the answer up to the chosen token, then the other token, then what the model makes of it. */
async function goOnWith(text) {
  const { chat, node, chosen } = shown;
  const kept = node.tokens.slice(0, chosen).filter((token) => !token.thinking);
  const beginning = kept.map((token) => token.text).join("") + text;
  const branch = addNode(chat, node.parent, { role: "assistant", model: chat.model, content: beginning, calls: [], tokens: [], finish: null });
  const body = bodyOf(chat, branch.id);
  chat.leaf = node.parent;
  delete chat.nodes[branch.id];
  location.hash = "#/chat";
  const made = answer(chat, node.parent, { messages: body.messages, continue_final_message: true });
  const added = chat.nodes[chat.leaf];
  added.content = beginning;
  await made;
  keep(chat);
}

// -- the prompt -------------------------------------------------------------------------------------

function promptPart() {
  const { node, prompt, promptError } = shown;
  if (promptError) return problem(`The prompt cannot be shown: ${promptError}`);
  if (!prompt) return html`<p class="muted">Reading the prompt…</p>`;
  const numCached = node.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const difference = node.details?.prefix_cache?.first_difference;
  const hasControl = prompt.tokens.some((token) => isControl(token));
  const isSame = !node.usage || prompt.count === node.usage.prompt_tokens;
  const chunks = new Map((prompt.chunks ?? []).map((chunk) => [chunk.start, chunk]));
  const segments = [];
  for (const [index, token] of prompt.tokens.entries()) {
    const chunk = chunks.get(index);
    if (token.id < 0 && !chunk) continue; // inside an image
    const kind = `${index < numCached ? "cached" : ""} ${chunk ? "image" : isControl(token) ? "control" : ""}`;
    const text = chunk ? `[${chunk.type}, ${count(chunk.count)} tokens]` : pieceOf(token);
    if (!chunk && segments.at(-1)?.kind === kind) segments.at(-1).text += text;
    else segments.push({ kind, text });
  }
  return html`
    <p>${count(prompt.count)} tokens, ${count(numCached)} of them from the prefix cache.
      ${difference ? html`The rest was not cached: at token ${difference.index} this prompt has <code>${visible(difference.got)}</code>${difference.expected != null ? html`, the cached one <code>${visible(difference.expected)}</code>` : ", the cached one another token"}.`
        : numCached ? "Everything that could be reused was." : "No cached prompt began like this one."}</p>
    ${isSame ? nothing : html`<p class="notice">The server read ${count(node.usage.prompt_tokens)} tokens: the prompt was changed before it was read, see Compressed.</p>`}
    <p class="legend"><span class="segment cached">cached</span>${hasControl ? html`<span class="segment control">control token</span>` : nothing}${chunks.size ? html`<span class="segment image">image</span>` : nothing}<span class="segment">text</span></p>
    <div class="prompt" tabindex="0" role="region" aria-label="The prompt as the model reads it">${segments.map(({ kind, text }) => html`<span class="segment ${kind}">${visible(text)}</span>`)}</div>`;
}

const pieceOf = (token) => (typeof token.piece === "string" ? token.piece : new TextDecoder().decode(new Uint8Array(token.piece)));
const isControl = (token) => /^<[|｜/]?[\w ▁|｜]+[|｜]?>$|^\[\/?[A-Z_]+\]$/.test(pieceOf(token));

// -- times, parameters, route, compression ----------------------------------------------------------

const STAGES = [["load", "waiting for the model"], ["render", "template"], ["tokenize", "tokenizer"], ["queue", "queue"], ["prefill", "prefill"], ["decode", "decode"]];

function times(details) {
  const timings = details.timings_ms;
  const total = STAGES.reduce((sum, [stage]) => sum + (timings[stage] ?? 0), 0) || 1;
  let x = 0;
  const parts = STAGES.map(([stage], index) => {
    const width = (1000 * (timings[stage] ?? 0)) / total;
    const part = svg`<rect class="stage s${index}" x=${x} width=${width} height="20"/>`;
    x += width;
    return part;
  });
  return html`<svg class="timeline" viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true">${parts}</svg>
    <table><caption class="visually-hidden">Times</caption><tbody>${STAGES.map(([stage, name], index) => html`<tr><th scope="row"><svg class="swatch" viewBox="0 0 10 10" aria-hidden="true"><rect class="stage s${index}" width="10" height="10"/></svg> ${name}</th><td class="num">${milliseconds(timings[stage])}</td></tr>`)}
      <tr><th scope="row">First token after</th><td class="num">${milliseconds(timings.first_token)}</td></tr>
      <tr><th scope="row">Total</th><td class="num">${milliseconds(timings.total)}</td></tr>
      <tr><th scope="row">Prefill speed</th><td class="num">${number(details.tokens_per_second.prefill)} tokens/s</td></tr>
      <tr><th scope="row">Decode speed</th><td class="num">${number(details.tokens_per_second.decode)} tokens/s</td></tr></tbody></table>`;
}

function savings(details) {
  const rows = Object.entries(details.optimizations).map(([name, value]) => [name.replaceAll("_", " "), count(value)]);
  for (const [name, counts] of Object.entries(details.drafters ?? {}))
    rows.push([`drafter ${name}`, `${counts.accepted_draft_tokens} of ${counts.drafted_tokens} accepted`]);
  return html`<table><caption class="visually-hidden">Work that was saved</caption><tbody>${rows.map(([name, value]) => html`<tr><th scope="row">${name}</th><td class="num">${value}</td></tr>`)}</tbody></table>`;
}

/** A value as JSON; a whole number that JavaScript cannot hold was kept as text. */
const exact = (value) => (typeof value === "string" && /^-?\d{16,}$/.test(value) ? value : JSON.stringify(value));

function parameters(details) {
  const all = Object.entries(details.parameters);
  const set = all.filter(([, { origin }]) => origin !== "built-in");
  const rest = all.filter(([, { origin }]) => origin === "built-in");
  const table = (rows) => html`<table><thead><tr><th scope="col">Parameter</th><th scope="col">Value</th><th scope="col">From</th></tr></thead><tbody>${rows.map(([name, { value, origin }]) => html`<tr><th scope="row">${name}</th><td><code>${value === undefined ? "as sent" : exact(value)}</code></td><td>${origin}</td></tr>`)}</tbody></table>`;
  return html`${table(set)}<details><summary>Built-in values (${rest.length})</summary>${table(rest)}</details>`;
}

export function routedPart(routed) {
  if (!routed) return html`<p>The model was named by the request; nothing was chosen.</p>`;
  return html`<pre tabindex="0" role="region" aria-label="How the model was chosen">${JSON.stringify(routed, null, 2)}</pre>`;
}

function compressedPart(details) {
  const result = details.compression;
  if (!result) return html`<p>The prompt was not shortened.</p>`;
  return html`<p>${result.failed ? `Not changed: ${result.failed}` : `${count(result.tokens_before)} tokens became ${count(result.tokens_after)} with ${result.method}, in ${milliseconds(result.ms)}.`}
    The <a href="#/compression">dry run</a> shows what was cut, sentence by sentence.</p>`;
}

function newest() {
  const chat = chats.open;
  const node = chat && pathTo(chat).findLast((one) => one.role === "assistant" && !one.isRunning);
  return node ? { chat, node } : null;
}

export const inspectView = {
  title: "Inspect",
  enter() {
    if (shown && chats.open === shown.chat && shown.chat.nodes[shown.node.id]) return;
    const found = newest();
    shown = null;
    if (found) inspect(found.chat, found.node);
  },
  render() {
    if (!shown && newest()) {
      const found = newest();
      inspect(found.chat, found.node);
    }
    if (!shown) return empty("Nothing to inspect yet", "Ask something in Chat; its answer appears here token by token.", html`<a class="button" href="#/chat">Open Chat</a>`);
    const { node } = shown;
    const details = node.details;
    const numTokens = node.tokens?.length ?? 0;
    const likely = numTokens ? node.tokens.reduce((sum, token) => sum + token.logprob, 0) / numTokens : null;
    return html`<div class="page">
      <p class="muted">The answer of ${node.servedBy ?? node.model} to “${shown.chat.nodes[node.parent]?.content?.slice(0, 80) ?? ""}”</p>
      <section aria-labelledby="answer-head"><h2 id="answer-head">Answer</h2>
        ${numTokens ? html`
          <p>${count(numTokens)} tokens, perplexity ${number(Math.exp(-likely), 2)}.</p>
          <p class="legend"><span class="token p1">90 % and more</span><span class="token p2">60 %</span><span class="token p3">30 %</span><span class="token p4">10 %</span><span class="token p5">less</span>
            <span><sup>F</sup> forced</span><span><sup>D</sup> drafted</span><span><sup>E</sup> early exit</span><span><sup>R</sup> after an interruption</span></p>
          <div class="inspect-grid"><div id="tokens" class="tokens" role="toolbar" aria-label="Tokens of the answer" aria-orientation="horizontal" @keydown=${onKey}
              @click=${(event) => { const button = event.target.closest("[data-at]"); if (button) choose(Number(button.dataset.at), false); }}>${tokenButtons(node)}</div>
            <div class="panel">${tokenPanel()}</div></div>`
          : html`<p class="muted">This answer was not recorded token by token: switch on “Record each token for Inspect” in the settings of the chat, for a model that takes <code>logprobs</code>.</p>
            <md-view .text=${node.content}></md-view>`}
      </section>
      <section aria-labelledby="prompt-head"><h2 id="prompt-head">Prompt</h2>${promptPart()}</section>
      ${details ? html`<div class="columns">
        <section aria-labelledby="times-head"><h2 id="times-head">Times</h2>${times(details)}</section>
        <section aria-labelledby="saved-head"><h2 id="saved-head">Work saved</h2>${savings(details)}</section>
        <section aria-labelledby="routed-head"><h2 id="routed-head">Routed</h2>${routedPart(details.routed)}</section>
        <section aria-labelledby="compressed-head"><h2 id="compressed-head">Compressed</h2>${compressedPart(details)}</section>
      </div>
      <section aria-labelledby="force-head"><h2 id="force-head">Parameters in force</h2>${parameters(details)}</section>`
        : html`<p class="muted">The answer has no details: it did not finish.</p>`}
    </div>`;
  },
};
