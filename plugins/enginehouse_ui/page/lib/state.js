// What several views share: the models with their states, the caller's rights, and the redraw of the page.
import { ApiError, getJson } from "./api.js";

export const state = {
  models: [],
  modelsRead: false,
  details: new Map(), // long form of models, by the name that was asked for
  schema: null,
  isAdmin: null, // null: not known yet
  needsKey: false,
  isOnline: true,
};

let draw = () => {};
let isPlanned = false;

export function onDraw(function_) {
  draw = function_;
}

/** Draw the page before the next frame, once for several calls. */
export function update() {
  if (isPlanned) return;
  isPlanned = true;
  const now = () => {
    if (!isPlanned) return;
    isPlanned = false;
    draw();
  };
  if (document.hidden) setTimeout(now, 100);
  else requestAnimationFrame(now);
}

/** Note what an error says about the connection and the key; return its text. */
export function noteError(error) {
  if (error instanceof ApiError) {
    if (error.status === 401) state.needsKey = true;
    if (error.status === 0) state.isOnline = false;
  }
  update();
  return error.message;
}

export async function readModels() {
  try {
    state.models = (await getJson("v1/models")).data;
    state.modelsRead = true;
    state.isOnline = true;
    state.needsKey = false;
    if (state.isAdmin === null) await readRights();
  } catch (error) {
    noteError(error);
  }
  update();
}

async function readRights() {
  try {
    await getJson("admin/models");
    state.isAdmin = true;
  } catch (error) {
    if (error.status === 0) throw error;
    state.isAdmin = false;
  }
}

export async function readSchema() {
  if (state.schema) return;
  try {
    state.schema = (await getJson("schema")).components.schemas;
  } catch (error) {
    noteError(error);
  }
  update();
}

const asked = new Set();

/** Return the long form of a model if it is known, and ask for it otherwise. */
export function detailsOf(name) {
  const known = state.details.get(name);
  const short = state.models.find((model) => model.id === name || model.aliases.includes(name));
  const isStale = known && short && known.state !== short.state;
  if ((!known || isStale) && name && !asked.has(name) && short) {
    asked.add(name);
    getJson(`v1/models/${name.split("/").map(encodeURIComponent).join("/")}`)
      .then((model) => state.details.set(name, { ...model, state: short.state }), noteError)
      .finally(() => {
        setTimeout(() => asked.delete(name), 2000);
        update();
      });
  }
  return known ?? null;
}

export function modelOf(name) {
  return state.models.find((model) => model.id === name || model.aliases.includes(name)) ?? null;
}

/** Names that a request may use, aliases after their models. */
export function modelNames() {
  return state.models.filter((model) => !model.task || model.task === "generate")
    .flatMap((model) => [model.id, ...model.aliases.filter((alias) => !alias.includes("*"))]);
}
