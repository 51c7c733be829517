// Chats as trees of messages, kept in this browser: an edit or another answer is a branch, nothing is overwritten.
import { update } from "./state.js";

const MOST = 200;
const STORE = "chats";
const LIST = "list"; // an index with what the list of chats shows, which can be read without the chats

/** `list` has {id, title, changed} of all chats; in memory are only the open one and those that still change. */
export const chats = { list: [], open: null, problem: "" };

const inMemory = new Map(); // chats by id

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("enginehouse", 2);
    request.onupgradeneeded = ({ oldVersion }) => {
      const store = oldVersion ? request.transaction.objectStore(STORE) : request.result.createObjectStore(STORE, { keyPath: "id" });
      store.createIndex(LIST, ["changed", "title"]);
    };
    request.onblocked = () => reject(new Error("another tab shows an older version of this page; close it and load this one again"));
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

/** The newest chat first. */
async function readList() {
  const store = (await database()).transaction(STORE).objectStore(STORE);
  const found = [];
  return new Promise((resolve, reject) => {
    const request = store.index(LIST).openKeyCursor(null, "prev");
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor) return resolve(found);
      const [changed, title] = cursor.key;
      found.push({ id: cursor.primaryKey, title, changed });
      cursor.continue();
    };
  });
}

async function readChat(id) {
  const chat = await inStore("readonly", (store) => store.get(id));
  if (!chat) throw new Error("it was deleted, maybe in another tab");
  for (const node of Object.values(chat.nodes)) if (node.isRunning) Object.assign(node, { isRunning: false, finish: "interrupted" });
  return chat;
}

export async function readChats() {
  try {
    chats.list = await readList();
  } catch (error) {
    chats.problem = `Chats are not kept: ${error.message}`;
  }
  const last = chats.list.find(({ id }) => id === sessionStorage.getItem("enginehouse.chat"));
  if (last) await openChat(last.id);
  chats.open ??= newChat();
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

let asked = ""; // the id of the chat that was asked for last

/** Show a chat that is kept. */
export async function openChat(id) {
  asked = id;
  try {
    const chat = inMemory.get(id) ?? (await readChat(id));
    if (asked !== id) return;
    inMemory.set(id, chat);
    chats.problem = "";
    showChat(chat);
  } catch (error) {
    chats.problem = `This chat cannot be opened: ${error.message}`;
    update();
  }
}

/** Show a chat, which may be a new one. */
export function showChat(chat) {
  asked = chat.id;
  chats.open = chat;
  sessionStorage.setItem("enginehouse.chat", chat.id);
  leaveMemory();
  update();
}

const isRunning = (chat) => Object.values(chat.nodes).some((node) => node.isRunning);

function leaveMemory() {
  for (const [id, chat] of inMemory) if (chat !== chats.open && !waiting.has(chat) && !isRunning(chat)) inMemory.delete(id);
}

const forgotten = new Set(); // ids; an answer that was stopped may still change its chat

/** The answers of a chat that are being generated. */
export function runningIn(id) {
  return Object.values(inMemory.get(id)?.nodes ?? {}).filter((node) => node.isRunning);
}

const WRITE_AFTER_MS = 300;
const waiting = new Map(); // chats that changed since they were written, with the time and the timer of the next write

/** Keep a chat, soon, also while it goes on changing; a chat without messages is not kept. */
export function keep(chat) {
  chat.changed = Date.now();
  if (!chat.leaf || forgotten.has(chat.id)) return;
  inMemory.set(chat.id, chat);
  const { id, title, changed } = chat;
  const listed = chats.list.find((one) => one.id === id);
  if (listed) Object.assign(listed, { title, changed });
  else {
    chats.list.unshift({ id, title, changed });
    sessionStorage.setItem("enginehouse.chat", id);
    for (const old of chats.list.splice(MOST)) inStore("readwrite", (store) => store.delete(old.id)).catch(noteProblem);
  }
  const afterMs = isRunning(chat) ? 10 * WRITE_AFTER_MS : WRITE_AFTER_MS;
  const at = performance.now() + afterMs;
  const planned = waiting.get(chat);
  if (planned?.at <= at) return;
  clearTimeout(planned?.timer);
  waiting.set(chat, { at, timer: setTimeout(() => write(chat), afterMs) });
}

/** A write copies the chat: the tokens of an answer that still runs, most of its size, are written at its end. */
function write(chat) {
  waiting.delete(chat);
  const nodes = Object.entries(chat.nodes).map(([id, node]) => [id, node.isRunning ? { ...node, tokens: [] } : node]);
  const written = { ...chat, nodes: Object.fromEntries(nodes) };
  if (chats.list.some(({ id }) => id === chat.id)) inStore("readwrite", (store) => store.put(written)).then(leaveMemory, noteProblem);
}

function noteProblem(error) {
  chats.problem = `This chat is not kept: ${error.message}`;
  update();
}

export async function forget(id) {
  forgotten.add(id);
  chats.list = chats.list.filter((one) => one.id !== id);
  inMemory.delete(id);
  if (chats.open.id === id) chats.open = newChat(chats.open);
  await inStore("readwrite", (store) => store.delete(id)).catch(noteProblem);
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
  const given = Object.fromEntries(Object.entries(chat).filter(([, value]) => value !== null));
  const taken = { ...newChat(), ...given, id: newChat().id };
  keep(taken);
  showChat(taken);
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
