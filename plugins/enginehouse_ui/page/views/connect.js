// Connect: what to paste into other clients, with this server's address and a model of it.
import { html } from "../vendor/lit-html/lit-html.js";
import { SERVER, savedKey } from "../lib/api.js";
import { copyButton, empty } from "../lib/parts.js";
import { asAnthropic, asCurl, asOpenAI } from "../lib/snippets.js";
import { modelNames, state, update } from "../lib/state.js";

let model = "";

function recipes(name) {
  const body = { model: name, messages: [{ role: "user", content: "Name the capital of France." }] };
  const keyed = Boolean(savedKey());
  const key = keyed ? "$ENGINEHOUSE_KEY" : "unused";
  const python = keyed ? 'os.environ["ENGINEHOUSE_KEY"]' : '"unused"';
  const imports = keyed ? "import os\n\n" : "";
  return [
    ["curl", "In a shell.", asCurl(body)],
    ["OpenAI's Python client", "pip install openai", asOpenAI(body)],
    ["Anthropic's Python client", "pip install anthropic", asAnthropic({ ...body, max_tokens: 256 })],
    ["LangChain", "pip install langchain-openai", `${imports}from langchain_openai import ChatOpenAI\n\nchat = ChatOpenAI(base_url="${SERVER}/v1", api_key=${python}, model="${name}")\nprint(chat.invoke("Name the capital of France.").content)`],
    ["Codex", "In ~/.codex/config.toml. Codex's instructions have about 9,000 tokens: the model needs a larger context.", `model = "${name}"\nmodel_provider = "enginehouse"\n[model_providers.enginehouse]\nname = "Enginehouse"\nbase_url = "${SERVER}/v1"\nwire_api = "responses"${keyed ? '\nenv_key = "ENGINEHOUSE_KEY"' : ""}`],
    ["Claude Code", "In a shell. Its prompts have some 20,000 tokens: give the model a context of at least 32,768.", `export ANTHROPIC_BASE_URL=${SERVER} ANTHROPIC_AUTH_TOKEN=${key}\nexport ANTHROPIC_MODEL=${name} ANTHROPIC_DEFAULT_HAIKU_MODEL=${name}\nclaude`],
    ["opencode", "In opencode.json.", JSON.stringify({ provider: { enginehouse: { npm: "@ai-sdk/openai-compatible", name: "Enginehouse", options: { baseURL: `${SERVER}/v1`, ...(keyed && { apiKey: "{env:ENGINEHOUSE_KEY}" }) }, models: { [name]: {} } } } }, null, 2)],
    ["Ollama's clients", "They find the server by this variable.", `export OLLAMA_HOST=${SERVER}`],
  ];
}

export const connectView = {
  title: "Connect",
  render() {
    const names = modelNames();
    if (!state.modelsRead) return html`<p class="muted">Reading the models…</p>`;
    if (!names.length) return empty("No model to connect to", "This server has no model that generates text.");
    if (!names.includes(model)) model = names[0];
    return html`<div class="page">
      <div class="field narrow"><label for="connect-model">Model</label><select id="connect-model" @change=${(event) => { model = event.target.value; update(); }}>${names.map((name) => html`<option value=${name} ?selected=${name === model}>${name}</option>`)}</select></div>
      <p class="muted">${savedKey() ? "This server needs a key: the snippets read it from the variable ENGINEHOUSE_KEY." : "This server needs no key here; clients that insist on one may send any text."}</p>
      ${recipes(model).map(([name, text, code]) => html`<section class="recipe"><div class="row"><h2>${name}</h2><span class="spacer"></span>${copyButton(() => code, `Copy`)}</div>
        <p class="muted">${text}</p><pre tabindex="0" role="region" aria-label=${name}>${code}</pre></section>`)}
    </div>`;
  },
};
