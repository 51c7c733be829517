// JSON Schema in the browser: problems of a schema as it is typed, and of an answer. The server enforces; this only shows.

const TYPES = ["null", "boolean", "object", "array", "number", "string", "integer"];

/** Return {value, problem} of JSON text; the problem names the line. */
export function parsed(text) {
  if (!text.trim()) return { value: undefined, problem: "" };
  try {
    return { value: JSON.parse(text), problem: "" };
  } catch (error) {
    const at = /position (\d+)/.exec(error.message);
    const line = at ? ` (line ${text.slice(0, Number(at[1])).split("\n").length})` : "";
    return { value: undefined, problem: `Not JSON: ${error.message.replace(/ in JSON at.*| \(line.*/, "")}${line}` };
  }
}

/** Return the first problem of a schema, or an empty text. */
export function problemOfSchema(schema, path = "the schema") {
  if (typeof schema === "boolean") return "";
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) return `${path} must be an object`;
  const types = schema.type === undefined ? [] : [schema.type].flat();
  const wrong = types.find((type) => !TYPES.includes(type));
  if (wrong !== undefined) return `${path}.type is ${JSON.stringify(wrong)}, not one of ${TYPES.join(", ")}`;
  if (schema.required !== undefined && !isTexts(schema.required)) return `${path}.required must be a list of names`;
  if (schema.enum !== undefined && !Array.isArray(schema.enum)) return `${path}.enum must be a list`;
  if (schema.pattern !== undefined) {
    try {
      new RegExp(schema.pattern, "u");
    } catch {
      return `${path}.pattern is not a regular expression`;
    }
  }
  for (const name of ["properties", "$defs", "definitions", "patternProperties"]) {
    if (schema[name] === undefined) continue;
    if (typeof schema[name] !== "object" || Array.isArray(schema[name])) return `${path}.${name} must be an object`;
    for (const [key, inner] of Object.entries(schema[name])) {
      const problem = problemOfSchema(inner, `${path}.${name}.${key}`);
      if (problem) return problem;
    }
  }
  for (const name of ["items", "additionalProperties", "not"]) {
    const problem = schema[name] === undefined ? "" : problemOfSchema(schema[name], `${path}.${name}`);
    if (problem) return problem;
  }
  for (const name of ["anyOf", "oneOf", "allOf"]) {
    if (schema[name] === undefined) continue;
    if (!Array.isArray(schema[name])) return `${path}.${name} must be a list`;
    const problems = schema[name].map((inner, index) => problemOfSchema(inner, `${path}.${name}[${index}]`));
    if (problems.some(Boolean)) return problems.find(Boolean);
  }
  return "";
}

const isTexts = (value) => Array.isArray(value) && value.every((item) => typeof item === "string");
const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);
const isType = (value, type) =>
  type === "integer" ? Number.isInteger(value) : type === typeOf(value);
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Return the first problem of a value, or an empty text. Knows the usual keywords. */
export function problemOfValue(value, schema, root = schema, path = "$") {
  if (schema === true || schema === undefined) return "";
  if (schema === false) return `${path} is not allowed`;
  if (schema.$ref?.startsWith("#")) {
    const target = schema.$ref.slice(1).split("/").filter(Boolean).reduce((inner, name) => inner?.[name], root);
    if (target) return problemOfValue(value, target, root, path);
  }
  if (schema.type !== undefined && ![schema.type].flat().some((type) => isType(value, type)))
    return `${path} is ${typeOf(value)}, not ${[schema.type].flat().join(" or ")}`;
  if (schema.enum && !schema.enum.some((one) => same(one, value))) return `${path} is not one of the listed values`;
  if ("const" in schema && !same(schema.const, value)) return `${path} is not ${JSON.stringify(schema.const)}`;
  if (typeof value === "number") {
    if (value < schema.minimum) return `${path} is below ${schema.minimum}`;
    if (value > schema.maximum) return `${path} is above ${schema.maximum}`;
  }
  if (typeof value === "string") {
    if (value.length < schema.minLength || value.length > schema.maxLength) return `${path} has a wrong length`;
    if (schema.pattern && !new RegExp(schema.pattern, "u").test(value)) return `${path} does not match the pattern`;
  }
  if (Array.isArray(value)) {
    if (value.length < schema.minItems || value.length > schema.maxItems) return `${path} has a wrong number of items`;
    for (const [index, item] of value.entries()) {
      const problem = problemOfValue(item, schema.items, root, `${path}[${index}]`);
      if (problem) return problem;
    }
  } else if (value && typeof value === "object") {
    const missing = schema.required?.find((name) => !(name in value));
    if (missing) return `${path} lacks ${missing}`;
    for (const [name, item] of Object.entries(value)) {
      const inner = schema.properties?.[name] ?? schema.additionalProperties;
      const problem = problemOfValue(item, inner, root, `${path}.${name}`);
      if (problem) return problem;
    }
  }
  const holds = (inner) => !problemOfValue(value, inner, root, path);
  if (schema.anyOf && !schema.anyOf.some(holds)) return `${path} matches none of anyOf`;
  if (schema.oneOf && schema.oneOf.filter(holds).length !== 1) return `${path} does not match exactly one of oneOf`;
  for (const inner of schema.allOf ?? []) {
    const problem = problemOfValue(value, inner, root, path);
    if (problem) return problem;
  }
  return "";
}
