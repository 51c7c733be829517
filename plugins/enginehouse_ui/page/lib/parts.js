// Small pieces that several views draw, and the numbers and words in them.
import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { copyText } from "./markdown.js";

const STATES = {
  ready: ["●", "good"], loading: ["◐", "busy"], draining: ["◑", "busy"], restarting: ["↻", "busy"],
  failed: ["✕", "bad"], unloaded: ["○", "idle"],
};

/** A state as a sign and a word: never by colour alone. */
export function stateBadge(model) {
  const [sign, kind] = STATES[model.state] ?? ["?", "idle"];
  const progress = model.state === "loading" && model.progress ? ` ${Math.round(100 * model.progress)} %` : "";
  return html`<span class="badge ${kind}"><span aria-hidden="true">${sign}</span> ${model.state}${progress}</span>`;
}

export function problem(text, action = nothing) {
  return text ? html`<div class="problem" role="alert"><p>${text}</p>${action}</div>` : nothing;
}

export function empty(title, text, action = nothing) {
  return html`<div class="empty"><h2>${title}</h2><p>${text}</p>${action}</div>`;
}

export function copyButton(text, label = "Copy") {
  return html`<button type="button" class="quiet small" @click=${(event) => copyText(text(), event.currentTarget)}>${label}</button>`;
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value) {
  if (value == null) return "–";
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

export function count(value) {
  return value == null ? "–" : Number(value).toLocaleString("en");
}

export function milliseconds(value) {
  if (value == null) return "–";
  if (value >= 60_000) return `${Math.floor(value / 60_000)} min ${Math.round((value % 60_000) / 1000)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

export function number(value, digits = 1) {
  return value == null || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
