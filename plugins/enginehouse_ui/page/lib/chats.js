// Chats as trees of messages, kept in this browser: an edit or another answer is a branch, nothing is overwritten.
import { update } from "./state.js";

const MOST = 200;
const STORE = "chats";

export const chats = { list: [], open: null, isRead: false, problem: "" };

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("enginehouse", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function inStore(mode, work) {
  const store = (await database()).transaction(STORE, mode).objectStore(STORE);
  return new Promise((resolve, reject) => {
    const request = work(store);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function readChats() {
  try {
    chats.list = (await inStore("readonly", (store) => store.getAll())).sort((a, b) => b.changed - a.changed);
    for (const chat of chats.list)
      for (const node of Object.values(chat.nodes)) if (node.isRunning) Object.assign(node, { isRunning: false, finish: "interrupted" });
  } catch (error) {
    chats.problem = `Chats are not kept: ${error.message}`;
  }
  chats.isRead = true;
  const last = sessionStorage.getItem("enginehouse.chat");
  chats.open = chats.list.find((chat) => chat.id === last) ?? newChat();
  update();
}

export function newChat(from) {
  const chat = {
    id: crypto.randomUUID?.() ?? String(Math.random()).slice(2),
    title: "",
    created: Date.now(),
    changed: Date.now(),
    model: from?.model ?? "",
    system: from?.system ?? "",
    parameters: { ...from?.parameters },
    tools: from?.tools ?? "",
    schema: "",
    records: from?.records ?? true,
    nodes: {},
    leaf: null,
  };
  return chat;
}

export function openChat(chat) {
  chats.open = chat;
  sessionStorage.setItem("enginehouse.chat", chat.id);
  update();
}

const WRITE_AFTER_MS = 300;
const waiting = new Map(); // chats that changed since they were written, with the time and the timer of the next write

/** Keep a chat, soon, also while it goes on changing; a chat without messages is not kept. */
export function keep(chat) {
  chat.changed = Date.now();
  if (!chat.leaf) return;
  if (!chats.list.includes(chat)) {
    chats.list.unshift(chat);
    sessionStorage.setItem("enginehouse.chat", chat.id);
    for (const old of chats.list.splice(MOST)) inStore("readwrite", (store) => store.delete(old.id)).catch(noteProblem);
  }
  const isRunning = Object.values(chat.nodes).some((node) => node.isRunning); // a write copies all tokens: not too often
  const afterMs = isRunning ? 10 * WRITE_AFTER_MS : WRITE_AFTER_MS;
  const at = performance.now() + afterMs;
  const planned = waiting.get(chat);
  if (planned?.at <= at) return;
  clearTimeout(planned?.timer);
  waiting.set(chat, { at, timer: setTimeout(() => write(chat), afterMs) });
}

function write(chat) {
  waiting.delete(chat);
  if (chats.list.includes(chat)) inStore("readwrite", (store) => store.put(chat)).catch(noteProblem);
}

function noteProblem(error) {
  chats.problem = `This chat is not kept: ${error.message}`;
  update();
}

export async function forget(chat) {
  chats.list = chats.list.filter((one) => one !== chat);
  if (chats.open === chat) chats.open = newChat(chat);
  await inStore("readwrite", (store) => store.delete(chat.id)).catch(noteProblem);
  update();
}

/** Take over a chat that was exported. Throws a text for people. */
export function importChat(text) {
  let chat;
  try {
    chat = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (!isChat(chat)) throw new Error("The file is not a chat that this page exported.");
  const taken = { ...newChat(), ...chat, id: newChat().id };
  keep(taken);
  openChat(taken);
}

const TEXTS = ["title", "model", "system", "tools", "schema"];

/** A file may come from anybody: texts are texts, images are data, and each message comes after its parent. */
function isChat(chat) {
  if (!isObject(chat) || !isObject(chat.nodes) || !isObject(chat.parameters)) return false;
  const isText = (value) => typeof value === "string";
  const isNode = ([id, node]) =>
    isObject(node) && node.id === id && /^\d+$/.test(id) && ["user", "assistant", "tool"].includes(node.role) && isText(node.content)
    && (node.parent === null || (isObject(chat.nodes[node.parent]) && Number(node.parent) < Number(id)))
    && [node.images ?? [], node.tokens ?? [], node.calls ?? []].every(Array.isArray)
    && (node.images ?? []).every((url) => isText(url) && url.startsWith("data:image/"));
  return TEXTS.every((name) => isText(chat[name] ?? "")) && Object.entries(chat.nodes).every(isNode)
    && (chat.leaf === null || Object.hasOwn(chat.nodes, chat.leaf));
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function addNode(chat, parent, node) {
  const id = String(Object.keys(chat.nodes).length + 1);
  chat.nodes[id] = { id, parent, created: Date.now(), ...node };
  chat.leaf = id;
  if (!chat.title && node.role === "user") chat.title = node.content.slice(0, 60).trim() || "Image";
  keep(chat);
  return chat.nodes[id];
}

/** The messages from the first to a leaf. */
export function pathTo(chat, leaf = chat.leaf) {
  const found = [];
  for (let node = chat.nodes[leaf]; node; node = chat.nodes[node.parent]) found.unshift(node);
  return found;
}

export function siblings(chat, node) {
  return Object.values(chat.nodes).filter((other) => other.parent === node.parent);
}

/** Show another branch: that of `node`, to its newest leaf. */
export function showBranch(chat, node) {
  let leaf = node;
  for (;;) {
    const children = Object.values(chat.nodes).filter((other) => other.parent === leaf.id);
    if (!children.length) break;
    leaf = children.at(-1);
  }
  chat.leaf = leaf.id;
  keep(chat);
  update();
}
