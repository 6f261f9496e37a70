// The openai and @anthropic-ai/sdk packages reading streams: fresh ones, and those that were
// replayed from an answer that was kept.
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import { apiKey, baseURL, collect, model, step } from './harness.mjs';

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const claude = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ''), apiKey, maxRetries: 0 });
const messages = [{ role: 'user', content: 'Say hello — grüß Gott, 你好.' }];
const base = { model, messages, max_tokens: 40, temperature: 0, seed: 7 };
const usage = { stream_options: { include_usage: true } };
const schema = { type: 'object', additionalProperties: false, required: ['city', 'days'], properties: { city: { type: 'string', enum: ['Rome', 'Oslo'] }, days: { type: 'integer', minimum: 1, maximum: 9 } } };
const call = { ...base, max_tokens: 200, tools: [{ type: 'function', function: { name: 'get_weather', description: 'The weather of a city', parameters: schema } }], tool_choice: { type: 'function', function: { name: 'get_weather' } } };
const chat = (more) => client.chat.completions.create({ ...base, ...more, stream: true });

// read forgets what a replay may change: where a text was cut, and how choices took turns. Of a
// stream it keeps the sorts of chunk, without texts and numbers of events, in the order of their
// names; each text, whole, by its place; and the order of events that have a type.
async function read(stream) {
  const { chunks, error } = await collect(await stream);
  const sorts = new Set(), order = [], texts = {};
  const fold = (v, key, place) => {
    if (Array.isArray(v)) return v.map((x) => fold(x, '', place + (x?.index ?? '')));
    if (v && typeof v === 'object') {
      const at = place + (Number.isInteger(v.index) ? `[${v.index}]` : '') + (v.output_index !== undefined ? `[${v.output_index}]` : '');
      return Object.fromEntries(Object.entries(v).map(([k, x]) => [k, fold(x, k, `${at}.${k}`)]));
    }
    if (key === 'sequence_number') return 'NUMBER';
    if (key === 'output_tokens' && place.startsWith('message_start')) return 'SO FAR'; // Anthropic's first figure says nothing
    if (typeof v === 'string' && ['content', 'text', 'arguments', 'partial_json', 'delta', 'reasoning', 'reasoning_content', 'refusal', 'thinking', 'token'].includes(key)) {
      texts[place] = (texts[place] ?? '') + v;
      return 'TEXT';
    }
    return v;
  };
  for (const c of chunks) {
    const sort = JSON.stringify(sorted(fold(c, '', c.type ?? '')));
    sorts.add(sort);
    if (c.type && order.at(-1) !== c.type) order.push(c.type);
  }
  return { sorts: [...sorts].sort().map((s) => JSON.parse(s)), order, texts, last: fold(chunks.at(-1) ?? null, '', 'last'), ...(error && { error }) };
}

const sorted = (v) => {
  if (Array.isArray(v)) return v.map(sorted);
  if (v && typeof v === 'object') return Object.fromEntries(Object.keys(v).sort().map((k) => [k, sorted(v[k])]));
  return v;
};

// seen is every event that a helper emits, but for those that a cut text makes.
async function seen(helper, names, final) {
  const events = [];
  for (const name of names) helper.on(name, (...args) => events.push([name, JSON.parse(JSON.stringify(args))]));
  return { final: await helper[final](), events };
}

await step('chat', () => read(chat()));
await step('chat.usage', () => read(chat(usage)));
await step('chat.length', () => read(chat({ ...usage, max_tokens: 3 })));
await step('chat.choices', () => read(chat({ ...usage, n: 2, temperature: 1 })));
await step('chat.logprobs', () => read(chat({ ...usage, logprobs: true, top_logprobs: 2 })));
await step('chat.tools', () => read(client.chat.completions.create({ ...call, ...usage, stream: true })));
await step('chat.tools.choices', () => read(client.chat.completions.create({ ...call, n: 2, stream: true })));
const chatEvents = ['content.done', 'refusal.done', 'tool_calls.function.arguments.done', 'logprobs.content.done', 'message', 'finalContent', 'finalFunctionToolCall', 'totalUsage', 'end'];
await step('chat.helper', () => seen(client.chat.completions.stream({ ...base, ...usage }), chatEvents, 'finalChatCompletion'));
await step('chat.helper.logprobs', () => seen(client.chat.completions.stream({ ...base, logprobs: true, top_logprobs: 1 }), chatEvents, 'finalChatCompletion'));
await step('chat.helper.tools', () => seen(client.chat.completions.stream(call), chatEvents, 'finalChatCompletion'));
await step('completion', () => read(client.completions.create({ model, prompt: 'Once upon', max_tokens: 20, temperature: 0, stream: true, ...usage })));
await step('completion.choices', () => read(client.completions.create({ model, prompt: ['Once', 'upon'], max_tokens: 5, temperature: 0, stream: true })));
const ask = { model, input: 'hi', max_output_tokens: 30, temperature: 0 };
const tool = { tools: [{ type: 'function', name: 'get_weather', parameters: schema, strict: true }], tool_choice: 'required', max_output_tokens: 200 };
await step('response', () => read(client.responses.create({ ...ask, stream: true })));
await step('response.length', () => read(client.responses.create({ ...ask, max_output_tokens: 2, stream: true })));
await step('response.helper', () => client.responses.stream(ask).finalResponse());
await step('response.helper.tools', () => client.responses.stream({ ...ask, ...tool }).finalResponse());

const claudeEvents = ['citation', 'signature', 'contentBlock', 'message', 'finalMessage', 'end'];
const claudeCall = { ...base, max_tokens: 200, tools: [{ name: 'get_weather', input_schema: schema }], tool_choice: { type: 'tool', name: 'get_weather' } };
await step('message', () => read(claude.messages.create({ ...base, stream: true })));
await step('message.length', () => read(claude.messages.create({ ...base, max_tokens: 3, stream: true })));
await step('message.tools', () => read(claude.messages.create({ ...claudeCall, stream: true })));
await step('message.helper', () => seen(claude.messages.stream(base), claudeEvents, 'finalMessage'));
await step('message.helper.tools', () => seen(claude.messages.stream(claudeCall), claudeEvents, 'finalMessage'));

// Streams as OpenAI and Anthropic send them, by the name of a model.
for (const name of ['openai', 'openai-tools', 'openai-refusal', 'vllm-thought']) {
  await step(`recorded.${name}`, () => read(chat({ ...usage, model: name })));
  await step(`recorded.${name}.helper`, () => seen(client.chat.completions.stream({ ...base, ...usage, model: name }), chatEvents, 'finalChatCompletion'));
}
await step('recorded.anthropic', () => read(claude.messages.create({ ...base, model: 'anthropic', stream: true })));
await step('recorded.anthropic.helper', () => seen(claude.messages.stream({ ...base, model: 'anthropic' }), claudeEvents, 'finalMessage'));
await step('recorded.response', () => read(client.responses.create({ ...ask, model: 'response', stream: true })));
await step('recorded.response.helper', () => client.responses.stream({ ...ask, model: 'response' }).finalResponse());
