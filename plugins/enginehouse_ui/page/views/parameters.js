// The form of request parameters, built from the server's own /schema: those of plugins appear by themselves.
import { html, noChange, nothing } from "../vendor/lit-html/lit-html.js";
import { repeat } from "../vendor/lit-html/directives/repeat.js";
import { live } from "../vendor/lit-html/directives/live.js";
import { detailsOf, readSchema, state, update } from "../lib/state.js";

const FIRST = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "enable_thinking", "thinking_budget", "reasoning_effort",
];
const MORE = [...FIRST, "cache_prompt", "cache_salt", "priority", "tool_choice", "parallel_tool_calls", "compression", "ignore_eos"];
let filter = "";
const wrong = new Map(); // texts that are not a value, by "chat/name"

function kindOf(schema) {
  const options = [schema, ...(schema.anyOf ?? [])];
  const types = options.flatMap((one) => one.type ?? []).filter((type) => type !== "null");
  const values = options.find((one) => one.enum)?.enum?.filter((value) => value !== null);
  if (values) return { kind: "choice", values };
  if (types.length === 1 && (types[0] === "number" || types[0] === "integer")) {
    const bounds = options.find((one) => one.minimum !== undefined || one.maximum !== undefined) ?? {};
    return { kind: "number", step: types[0] === "integer" ? 1 : "any", min: bounds.minimum, max: bounds.maximum };
  }
  if (types.length === 1 && types[0] === "boolean") return { kind: "choice", values: [true, false] };
  return { kind: types.includes("string") ? "text" : "json" };
}

function read(text, { kind, values }, name) {
  if (text === "") return undefined;
  if (kind === "number") {
    if (Number.isInteger(Number(text)) && !Number.isSafeInteger(Number(text))) throw new Error("This page takes whole numbers up to 2^53 - 1.");
    return Number(text);
  }
  if (kind === "choice") return values.find((value) => String(value) === text);
  if (kind === "text" && !/^[[{"]/.test(text.trim())) return text;
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${name} must be JSON, such as ["a", "b"]`);
  }
}

function shown(value) {
  if (value === undefined || value === null) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** The form for `target.parameters` of requests to a model. `id` tells several forms apart. */
export function parameterForm(target, model, { id = "chat", onChange = () => {} } = {}) {
  readSchema();
  const details = detailsOf(model);
  const known = state.schema?.ChatCompletionRequest?.properties;
  if (!known) return html`<p class="muted">Reading the parameters…</p>`;
  const names = [...new Set([...FIRST, ...Object.keys(details?.parameters ?? {}), ...MORE])].filter((name) => known[name]);
  const rows = (chosen) => repeat(chosen, (name) => name, (name) => field(target, name, known[name], details, id, onChange));
  const rest = names.filter((name) => !FIRST.includes(name) && (name.includes(filter) || known[name].description?.toLowerCase().includes(filter)));
  const numSet = Object.keys(target.parameters).length;
  return html`
    <div class="parameters">
      ${rows(names.filter((name) => FIRST.includes(name)))}
      <details>
        <summary>All parameters (${names.length})</summary>
        <label class="field"><span>Find</span>
          <input type="search" .value=${live(filter)} @input=${(event) => { filter = event.target.value.toLowerCase(); update(); }}></label>
        ${rows(rest)}
        ${rest.length ? nothing : html`<p class="muted">No parameter has this in its name or description.</p>`}
      </details>
      ${numSet ? html`<button type="button" class="quiet small" @click=${() => { target.parameters = {}; wrong.clear(); onChange(); update(); }}>
        Use the model's values (${numSet} set here)</button>` : nothing}
    </div>`;
}

function field(target, name, schema, details, id, onChange) {
  const form = kindOf(schema);
  const own = target.parameters[name];
  const inForce = details?.parameters?.[name];
  const capability = details?.capabilities?.[name];
  const isRefused = capability?.support === "refused";
  const origin = own !== undefined ? "request" : (inForce?.origin ?? "unset");
  const place = `${id}/${name}`;
  const inputId = `parameter-${id}-${name}`;
  const error = wrong.get(place);
  const change = (event) => {
    try {
      if (event.target.validity.badInput) throw new Error("This is not a number.");
      const value = read(event.target.value, form, name);
      wrong.delete(place);
      if (value === undefined) delete target.parameters[name];
      else target.parameters[name] = value;
      if (!event.target.checkValidity()) wrong.set(place, event.target.validationMessage);
    } catch (problem) {
      wrong.set(place, problem.message);
    }
    onChange();
    update();
  };
  const isTyped = error || document.activeElement?.id === inputId; // what is being typed stays as it is
  const about = `${inputId}-about`;
  const control = form.kind === "choice"
    ? html`<select id=${inputId} ?disabled=${isRefused} aria-describedby=${about} @change=${change}>
        <option value="" ?selected=${own === undefined}>${inForce?.value != null ? `model: ${shown(inForce.value)}` : "model's own"}</option>
        ${form.values.map((value) => html`<option value=${String(value)} ?selected=${own === value}>${String(value)}</option>`)}
      </select>`
    : html`<input id=${inputId} type=${form.kind === "number" ? "number" : "text"} step=${form.step ?? nothing} min=${form.min ?? nothing}
        max=${form.max ?? nothing} ?disabled=${isRefused} placeholder=${shown(inForce?.value)} aria-describedby=${about}
        aria-invalid=${error ? "true" : "false"} .value=${isTyped ? noChange : live(shown(own))} @input=${change} @blur=${update}>`;
  return html`
    <div class="field parameter ${own !== undefined ? "is-set" : ""}">
      <label for=${inputId}>${name}</label>
      ${control}
      <span class="origin" title="Where the value in force comes from">${origin}${schema["x-plugin"] ? html` · ${schema["x-plugin"]}` : nothing}</span>
      <p class="about" id=${about}>${error ? html`<strong class="bad">${error}</strong>` : isRefused ? `Refused by this model: ${capability.reason}` : schema.description}</p>
    </div>`;
}
