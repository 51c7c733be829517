// One answer of the server: the request for a chat, and the stream that fills its message.
import { ApiError, stream } from "./api.js";
import { addNode, keep, pathTo } from "./chats.js";
import { parsed } from "./json_schema.js";
import { detailsOf, noteError, readModels, state, update } from "./state.js";

const running = new Map(); // message to its AbortController

/** Return true if a model takes a request field. */
export function takes(model, field) {
  const support = detailsOf(model)?.capabilities?.[field]?.support;
  return support !== "refused";
}

/** The body of the request for the messages up to `leaf`. */
export function bodyOf(chat, leaf = chat.leaf) {
  const messages = pathTo(chat, leaf).filter((node) => node.role !== "assistant" || !node.error || node.content);
  const body = { model: chat.model, messages: messages.map(messageOf) };
  if (chat.system.trim()) body.messages.unshift({ role: "system", content: chat.system });
  Object.assign(body, chat.parameters);
  const tools = parsed(chat.tools).value;
  if (Array.isArray(tools) && tools.length) body.tools = tools;
  const schema = parsed(chat.schema).value;
  if (schema !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return body;
}

function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role === "assistant") {
    const message = { role: "assistant", content: node.content };
    if (node.calls?.length)
      message.tool_calls = node.calls.map(({ id, name, text }) => ({
        id, type: "function", function: { name, arguments: text },
      }));
    return message;
  }
  if (!node.images?.length) return { role: "user", content: node.content };
  const images = node.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [{ type: "text", text: node.content }, ...images] };
}

/** The same, with what the page asks for beside it: the stream, and the marks of each token if they are recorded. */
export function streamedBody(chat, leaf) {
  const body = { ...bodyOf(chat, leaf), stream: true, stream_options: { include_usage: true } };
  if (chat.records && takes(chat.model, "logprobs") && takes(chat.model, "token_details"))
    Object.assign(body, { logprobs: true, top_logprobs: 5, token_details: true });
  return body;
}

/** Answer the messages up to `leaf`; the answer is a new message. `extra` are further fields of the request. */
export async function answer(chat, leaf, extra = {}, listen = () => {}) {
  const body = { ...streamedBody(chat, leaf), ...extra };
  const node = addNode(chat, leaf, {
    role: "assistant", model: chat.model, content: "", reasoning: "", calls: [], tokens: [], isRunning: true,
    request: { ...body, messages: undefined }, finish: null, error: null, usage: null, details: null,
  });
  await fill(node, body, listen, () => keep(chat));
  keep(chat);
  return node;
}

/** Fill a message from the stream of a request. */
export async function fill(node, body, listen = () => {}, onPiece = () => {}) {
  const controller = new AbortController();
  running.set(node, controller);
  node.isRunning = true;
  node.startMs = performance.now();
  node.stalled = "";
  let isDone = false;
  let lastMs = performance.now();
  const watch = setInterval(async () => {
    if (performance.now() - lastMs < 2500) return;
    await readModels();
    const model = state.models.find((one) => one.id === node.model || one.aliases.includes(node.model));
    node.stalled = model && model.state !== "ready" ? `The model is ${model.state}.` : "Waiting for the next token.";
    if (model?.state === "restarting") node.wasRestarted = true;
    update();
  }, 1000);
  try {
    const options = { signal: controller.signal, headers: { "x-enginehouse-details": "true" } };
    for await (const event of stream("POST", "v1/chat/completions", body, options)) {
      lastMs = performance.now();
      node.stalled = "";
      if (event.data === "[DONE]") {
        isDone = true; // read on to the end: an ended stream is not a broken one
        continue;
      }
      take(node, JSON.parse(event.data, exactNumber), listen);
      onPiece();
      update();
    }
    if (!isDone && !node.error) node.error = { message: "The answer ended early: the connection was closed." };
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else {
      noteError(error);
      node.error = { message: error.message, code: error.code, param: error.param, requestId: error.requestId };
      if (!(error instanceof ApiError)) throw error;
    }
  } finally {
    clearInterval(watch);
    running.delete(node);
    node.isRunning = false;
    node.stalled = "";
    node.totalMs = performance.now() - node.startMs;
    listen("", true);
    update();
  }
}

/** Seeds have 64 bits: whole numbers that JavaScript cannot hold stay text. */
function exactNumber(_, value, context) {
  return Number.isInteger(value) && !Number.isSafeInteger(value) ? (context?.source ?? value) : value;
}

function take(node, chunk, listen) {
  if (chunk.error) {
    node.error = chunk.error;
    return;
  }
  node.servedBy = chunk.model;
  if (chunk.usage) node.usage = chunk.usage;
  if (chunk.enginehouse) node.details = chunk.enginehouse;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) {
    node.thinkStartMs ??= performance.now();
    node.reasoning += reasoning;
    node.thinkMs = performance.now() - node.thinkStartMs;
  }
  if (delta.content) {
    node.firstMs ??= performance.now() - node.startMs;
    node.content += delta.content;
    listen(delta.content, false);
  }
  for (const piece of delta.tool_calls ?? []) {
    const call = (node.calls[piece.index ?? 0] ??= { id: "", name: "", text: "" });
    if (piece.id) call.id = piece.id;
    call.name += piece.function?.name ?? "";
    call.text += piece.function?.arguments ?? "";
  }
  for (const token of choice.logprobs?.content ?? []) {
    node.tokens.push({
      text: token.token,
      logprob: token.logprob,
      top: token.top_logprobs.map((one) => [one.token, one.logprob]),
      ...(token.forced && { forced: true }),
      ...(token.drafted_by && { draft: token.drafted_by }),
      ...(token.exit_layer != null && { exit: token.exit_layer }),
      ...(token.resumed && { resumed: true }),
      ...(reasoning && { thinking: true }),
    });
  }
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

export function stop(node) {
  running.get(node)?.abort();
}

export function stopAll() {
  for (const controller of running.values()) controller.abort();
  return running.size;
}
