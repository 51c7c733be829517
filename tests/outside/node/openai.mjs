// npm's `openai` against a server: `node openai.mjs BASE_URL MODEL CASE` prints what it understood, as one line of JSON.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model, caseName] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Name the capital of France." }];
const asked = { model, messages, temperature: 0 };
const parameters = {
  type: "object",
  properties: { on: { type: "boolean" }, level: { type: "integer", minimum: 0, maximum: 10 } },
  required: ["on", "level"],
  additionalProperties: false,
};
const lamp = { type: "function", function: { name: "set_lamp", description: "Switches the lamp.", parameters } };

const cases = {
  async text() {
    const deltas = [];
    const stream = client.chat.completions.stream({
      ...asked,
      max_tokens: 24,
      stream_options: { include_usage: true },
    });
    stream.on("content", (delta) => deltas.push(delta));
    const { choices, usage } = await stream.finalChatCompletion();
    return { deltas, content: choices[0].message.content, finishReason: choices[0].finish_reason, usage };
  },

  async tools() {
    const deltas = [];
    const stream = client.chat.completions.stream({
      ...asked,
      tools: [lamp],
      tool_choice: { type: "function", function: { name: "set_lamp" } },
      max_tokens: 200,
    });
    stream.on("tool_calls.function.arguments.delta", (event) => deltas.push(event.arguments_delta));
    const { choices } = await stream.finalChatCompletion();
    const [call] = choices[0].message.tool_calls;
    return { deltas, call: call.function, finishReason: choices[0].finish_reason };
  },

  async parse() {
    const place = z.object({ city: z.enum(["Paris", "Rome"]), people: z.number().int().min(0).max(99) });
    const answer = await client.chat.completions.parse({
      ...asked,
      response_format: zodResponseFormat(place, "place"),
      max_tokens: 80,
    });
    return answer.choices[0].message.parsed;
  },

  async refused() {
    try {
      await client.chat.completions.create({ ...asked, temperature: 9, stream: true });
    } catch (error) {
      return { name: error.constructor.name, status: error.status, param: error.param, code: error.code };
    }
    return null;
  },
};

console.log(JSON.stringify(await cases[caseName]()));
