// The AI SDK: `node ai_sdk.mjs BASE_URL MODEL CASE PROVIDER` prints what it understood of a server, as a line of JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // it would print them among the JSON
const [baseURL, modelName, caseName, providerName] = process.argv.slice(2);
const common = { baseURL, apiKey: "unused" };
// Each provider, with its words for thinking and for one call at a time.
const providers = {
  "openai-compatible": () => ({
    provider: createOpenAICompatible({
      ...common,
      name: "enginehouse",
      includeUsage: true,
      supportsStructuredOutputs: true,
    }),
    oneCall: { enginehouse: { parallel_tool_calls: false } },
  }),
  openai: () => ({
    provider: createOpenAI(common).responses,
    thinks: { openai: { forceReasoning: true, reasoningEffort: "low" } },
    oneCall: { openai: { parallelToolCalls: false } },
  }),
  anthropic: () => ({
    provider: createAnthropic(common),
    thinks: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
    oneCall: { anthropic: { disableParallelToolUse: true } },
  }),
};
const { provider, thinks, oneCall } = providers[providerName]();
const asked = { model: provider(modelName), maxRetries: 0, temperature: 0 };
const thinking = { model: asked.model, maxRetries: 0, prompt: "Think, then answer.", providerOptions: thinks };
const lamp = z.object({ on: z.boolean(), level: z.number().int().min(0).max(10) });
const place = z.object({ city: z.enum(["Paris", "Rome"]), people: z.number().int().min(0).max(99) });

// Every part of a stream, with what it adds.
async function parts(result) {
  const seen = [];
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    const { type, text, delta, toolName, input, finishReason, totalUsage } = part;
    seen.push({ type, text, delta, toolName, input, finishReason, totalUsage });
  }
  return seen;
}

const cases = {
  text: () => parts(streamText({ ...asked, prompt: "Name the capital of France.", maxOutputTokens: 24 })),

  reasoning: () => parts(streamText(thinking)),

  async whole_reasoning() {
    const { text, reasoningText, finishReason } = await generateText(thinking);
    return { text, reasoningText, finishReason };
  },

  tools: () =>
    parts(
      streamText({
        ...asked,
        prompt: "Switch the lamp on, level 3.",
        tools: { set_lamp: tool({ description: "Switches the lamp.", inputSchema: lamp }) },
        toolChoice: { type: "tool", toolName: "set_lamp" },
        maxOutputTokens: 200,
      }),
    ),

  // The SDK runs the tool, sends its result back and asks again.
  async tool_turns() {
    const { steps, text } = await generateText({
      ...asked,
      prompt: "Which time is it?",
      tools: {
        now: tool({ description: "The time.", inputSchema: z.object({}), execute: async () => "a quarter past nine" }),
      },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
      providerOptions: oneCall,
      stopWhen: stepCountIs(2),
      maxOutputTokens: 40,
    });
    return { text, steps: steps.map(({ finishReason, toolCalls, toolResults }) => ({
      finishReason,
      calls: toolCalls.map(({ toolName, input }) => ({ toolName, input })),
      results: toolResults.map(({ output }) => output),
    })) };
  },

  async object() {
    const { output } = await generateText({
      ...asked,
      prompt: "Where is the Eiffel Tower?",
      output: Output.object({ schema: place }),
      maxOutputTokens: 80,
    });
    return output;
  },

  async streamed_object() {
    const result = streamText({
      ...asked,
      prompt: "Where is the Eiffel Tower?",
      output: Output.object({ schema: place }),
      maxOutputTokens: 80,
    });
    const partial = [];
    for await (const value of result.partialOutputStream) partial.push(value);
    return { partial, final: await result.output };
  },

  async refused() {
    try {
      await generateText({ ...asked, model: provider("no-such-model"), prompt: "Hello" });
    } catch (error) {
      return { name: error.name, status: error.statusCode, message: error.message };
    }
    return null;
  },
};

console.log(JSON.stringify(await cases[caseName]()));
