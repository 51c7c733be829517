// ollama.mjs URL MODEL CASE: prints what npm's `ollama` understood, as JSON.
import { Ollama } from "ollama";

const [, , url, model, wanted] = process.argv;
const client = new Ollama({ host: url });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { temperature: 0, num_predict: 24 };
const weather = {
  type: "function",
  function: { name: "weather", description: "Tells the weather.", parameters: { type: "object", properties: { city: { type: "string" } } } },
};

const cases = {
  async text() {
    const deltas = [];
    let last;
    for await (const part of await client.chat({ model, messages, options, stream: true })) {
      deltas.push(part.message.content);
      last = part;
    }
    return { deltas, last };
  },
  async thinking() {
    return (await client.chat({ model, messages, think: true })).message;
  },
  async tools() {
    const first = await client.chat({ model, messages, tools: [weather] });
    const result = { role: "tool", tool_name: "weather", content: "sunny" };
    const second = await client.chat({ model, messages: [...messages, first.message, result], tools: [weather] });
    return { first: first.message, second: second.message };
  },
  async format() {
    const schema = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
    return JSON.parse((await client.generate({ model, prompt: "Name a city.", format: schema, options })).response);
  },
  async models() {
    return { list: await client.list(), show: await client.show({ model }), ps: await client.ps(), version: await client.version() };
  },
  async refused() {
    try {
      await client.delete({ model });
    } catch (error) {
      return { name: error.name, message: error.message, status: error.status_code };
    }
  },
};

console.log(JSON.stringify(await cases[wanted]()));
