// Two tools that run in the browser, to try a model's calls without writing any.

export const DEMO_TOOLS = [
  {
    type: "function",
    function: { name: "clock", description: "The date and time now.", parameters: { type: "object", properties: {} } },
  },
  {
    type: "function",
    function: {
      name: "calculator",
      description: "The value of an arithmetic expression.",
      parameters: {
        type: "object",
        properties: { expression: { type: "string", description: "Such as (2 + 3) * 4" } },
        required: ["expression"],
      },
    },
  },
];

/** Return the result of a demo tool as text, or null for any other tool. */
export function runDemo(name, values) {
  if (name === "clock") return new Date().toString();
  if (name !== "calculator") return null;
  try {
    return String(calculated(String(values.expression ?? "")));
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** Value of an expression of numbers, + - * / ^ and parentheses; nothing is evaluated as code. */
export function calculated(text) {
  const tokens = text.match(/\d+(?:\.\d+)?|[-+*/^()]|\S/g) ?? [];
  let at = 0;
  const next = () => tokens[at++];
  const value = () => {
    const token = next();
    if (token === "-") return -power();
    if (token === "+") return power();
    if (token === "(") {
      const inner = sum();
      if (next() !== ")") throw new Error("a parenthesis is not closed");
      return inner;
    }
    if (token === undefined || !/^\d/.test(token)) throw new Error(`unexpected ${token ?? "end"}`);
    return Number(token);
  };
  const power = () => {
    const base = value();
    return tokens[at] === "^" ? (next(), base ** power()) : base;
  };
  const product = () => {
    let result = power();
    while (tokens[at] === "*" || tokens[at] === "/") result = next() === "*" ? result * power() : result / power();
    return result;
  };
  const sum = () => {
    let result = product();
    while (tokens[at] === "+" || tokens[at] === "-") result = next() === "+" ? result + product() : result - product();
    return result;
  };
  const result = sum();
  if (at < tokens.length) throw new Error(`unexpected ${tokens[at]}`);
  return result;
}
