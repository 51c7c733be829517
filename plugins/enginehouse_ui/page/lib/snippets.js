// The same request in other words: curl, OpenAI's and Anthropic's clients.
import { SERVER, savedKey } from "./api.js";

/** Keys are never written into a snippet. */
const key = () => (savedKey() ? "$ENGINEHOUSE_KEY" : "");
const pythonKey = () => (savedKey() ? 'os.environ["ENGINEHOUSE_KEY"]' : '"none"');
const pythonImport = () => (savedKey() ? "import os\n\n" : "");

const shell = (text) => `'${text.replace(/'/g, `'\\''`)}'`;

/** A value as a Python literal. */
export function python(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => python(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = open + items.join(", ") + close;
  if (short.length < 80 && !short.includes("\n")) return short;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

export function asCurl(body) {
  const header = key() ? ` \\\n  -H "Authorization: Bearer ${key()}"` : "";
  return `curl ${SERVER}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${header} \\\n  -d ${shell(JSON.stringify(body, null, 2))}`;
}

const OPENAI = new Set([
  "model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "n", "tools", "tool_choice",
  "response_format", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "reasoning_effort", "stream",
]);

export function asOpenAI(body) {
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const lines = Object.entries(body).filter(([name]) => OPENAI.has(name))
    .map(([name, value]) => `    ${name}=${python(value, "    ")},\n`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, "    ")},\n`);
  return `${pythonImport()}from openai import OpenAI\n\nclient = OpenAI(base_url="${SERVER}/v1", api_key=${pythonKey()})\n`
    + `answer = client.chat.completions.create(\n${lines.join("")})\nprint(answer.choices[0].message.content)`;
}

/** Anthropic's form of a chat: the system text and the tools have other places, and max_tokens is required. */
export function asAnthropic(body) {
  const system = body.messages.filter((message) => message.role === "system").map((message) => message.content).join("\n");
  const messages = [];
  for (const message of body.messages.filter((one) => one.role !== "system")) messages.push(anthropicMessage(message));
  const members = { model: body.model, max_tokens: body.max_tokens ?? 1024, messages };
  if (system) members.system = system;
  for (const name of ["temperature", "top_p", "top_k"]) if (body[name] !== undefined) members[name] = body[name];
  if (body.stop !== undefined) members.stop_sequences = [body.stop].flat();
  if (body.tools)
    members.tools = body.tools.map(({ function: tool }) => ({
      name: tool.name, description: tool.description ?? "", input_schema: tool.parameters ?? { type: "object" },
    }));
  const lines = Object.entries(members).map(([name, value]) => `    ${name}=${python(value, "    ")},\n`);
  return `${pythonImport()}from anthropic import Anthropic\n\nclient = Anthropic(base_url="${SERVER}", api_key=${pythonKey()})\n`
    + `answer = client.messages.create(\n${lines.join("")})\nprint(answer.content)`;
}

function anthropicMessage(message) {
  if (message.role === "tool")
    return { role: "user", content: [{ type: "tool_result", tool_use_id: message.tool_call_id, content: message.content }] };
  const text = message.content ? [{ type: "text", text: message.content }] : [];
  if (message.tool_calls)
    return {
      role: "assistant",
      content: [...text, ...message.tool_calls.map(({ id, function: call }) => ({
        type: "tool_use", id, name: call.name, input: safeJson(call.arguments),
      }))],
    };
  if (typeof message.content === "string") return { role: message.role, content: message.content };
  return {
    role: message.role,
    content: message.content.map((part) => {
      if (part.type !== "image_url") return part;
      const [, type, data] = /^data:([^;]+);base64,(.*)$/.exec(part.image_url.url) ?? [];
      return { type: "image", source: { type: "base64", media_type: type, data } };
    }),
  };
}

function safeJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}
