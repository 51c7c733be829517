// The public API of the server that this page came from. Knows nothing of the page.

/** Path of the server's root: the page is at <root>/ui/console/, also below a proxy's prefix. */
export const ROOT = new URL("../../", document.baseURI).pathname;
/** Address of the server, without a slash at its end. */
export const SERVER = new URL(ROOT, document.baseURI).href.replace(/\/$/, "");

const KEY = "enginehouse.key";

export function savedKey() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

export function saveKey(key, remember) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
}

/** An error of the API, or of the connection (status 0). */
export class ApiError extends Error {
  constructor(status, error = {}, requestId = "") {
    super(error.message ?? `The server answered with status ${status}.`);
    Object.assign(this, { status, code: error.code ?? "", param: error.param ?? null, requestId });
  }
}

/** Remove what an address names; return what the server says of it. */
export async function remove(path) {
  return (await send("DELETE", path)).json();
}

async function send(method, path, body, { signal, headers = {} } = {}) {
  const key = savedKey();
  const all = { ...headers, ...(key && { authorization: `Bearer ${key}` }) };
  if (body !== undefined) all["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(ROOT + path, { method, headers: all, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached.", code: "unreachable" });
  }
  if (answer.ok) return answer;
  const id = answer.headers.get("x-request-id") ?? "";
  const text = await answer.text();
  let error;
  try {
    error = JSON.parse(text).error;
  } catch {
    error = { message: text.slice(0, 500) || undefined };
  }
  throw new ApiError(answer.status, typeof error === "string" ? { message: error } : error, id);
}

export async function getJson(path, options) {
  return (await send("GET", path, undefined, options)).json();
}

export async function getText(path, options) {
  return (await send("GET", path, undefined, options)).text();
}

export async function post(path, body, options) {
  return (await send("POST", path, body, options)).json();
}

/** Reader of server-sent events: takes pieces of text, returns the finished events as {event, data}. */
export class EventReader {
  #rest = "";
  #isFirst = true;

  push(text) {
    if (this.#isFirst && text) {
      this.#isFirst = false;
      text = text.replace(/^\uFEFF/, "");
    }
    this.#rest += text;
    const events = [];
    for (;;) {
      const end = /\r\n\r\n|\n\n|\r\r(?!\n)/.exec(this.#rest);
      if (!end) return events;
      const block = this.#rest.slice(0, end.index);
      this.#rest = this.#rest.slice(end.index + end[0].length);
      const found = { event: "message", data: [] };
      for (const line of block.split(/\r\n|\n|\r/)) {
        const colon = line.indexOf(":");
        if (colon === 0 || !line) continue;
        const name = colon < 0 ? line : line.slice(0, colon);
        const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (name === "data") found.data.push(value);
        else if (name === "event") found.event = value;
      }
      if (found.data.length) events.push({ event: found.event, data: found.data.join("\n") });
    }
  }
}

/** Yield the events of a streamed answer, as they come. */
export async function* stream(method, path, body, options) {
  const answer = await send(method, path, body, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* events.push(value);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The connection to the server was lost.", code: "connection_lost" });
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Parse Prometheus' text format: a list of {name, labels, value}. */
export function parseMetrics(text) {
  const found = [];
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const parts = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    found.push({ name: parts[1], labels, value: Number(parts[3]) });
  }
  return found;
}
