// The AI SDK (ai, @ai-sdk/openai-compatible), which parses more strictly than most.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { embedMany, generateText, jsonSchema, streamText, tool } from 'ai';
import { apiKey, baseURL, collect, embedModel, embedURL, fault, faults, gateway, model, step } from './harness.mjs';

const provider = (key, url = baseURL) => createOpenAICompatible({ name: 'local', baseURL: url, apiKey: key, includeUsage: true });
const p = provider(apiKey);
const base = { model: p(model), prompt: 'Say hello — grüß Gott, 你好.', maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const withFault = (name) => ({ providerOptions: { local: fault(name) } });
const tools = {
  get_weather: tool({
    description: 'The weather of a city',
    inputSchema: jsonSchema({ type: 'object', required: ['city'], properties: { city: { type: 'string', enum: ['Rome', 'Oslo'] } } }),
  }),
};
const toolCall = { ...base, tools, toolChoice: { type: 'tool', toolName: 'get_weather' }, maxOutputTokens: 200 };
const answer = (r) => ({ text: r.text, finish: r.finishReason, usage: r.usage, tools: r.toolCalls });
// part drops timings and the request's and response's envelopes, which name the address.
const part = ({ request, response, performance, error, ...rest }) => ({
  ...rest, ...(error && { error: { name: error.name, statusCode: error.statusCode, message: error.message ?? error } }),
});
const stream = (o) => collect(streamText({ onError() {}, ...o }).fullStream, part);

await step('text', async () => answer(await generateText(base)));
await step('stream', () => stream(base));
await step('tools', async () => answer(await generateText(toolCall)));
await step('tools.stream', () => stream(toolCall));
await step('embed', async () => {
  const { embeddings, usage } = await embedMany({ model: provider(apiKey, embedURL).embeddingModel(embedModel), values: ['a b', 'c'], maxRetries: 0 });
  return { embeddings, usage };
});
await step('error.model', () => generateText({ ...base, model: p('no-such-model') }));
await step('error.context', () => generateText({ ...base, maxOutputTokens: 1_000_000 }));

if (faults) {
  await step('fault.503', () => generateText({ ...base, ...withFault('503') }));
  await step('fault.inband', () => stream({ ...base, ...withFault('inband=3') }));
  await step('fault.cut', () => stream({ ...base, ...withFault('cut=3') }));
}

if (gateway) await step('gateway.key', () => generateText({ ...base, model: provider('not a key')(model) }));
