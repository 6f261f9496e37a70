// The @anthropic-ai/sdk package against /v1/messages.
import Anthropic from '@anthropic-ai/sdk';
import { apiKey, baseURL, collect, fault, faults, gateway, headers, model, step } from './harness.mjs';

const root = baseURL.replace(/\/v1$/, '');
const client = new Anthropic({ baseURL: root, apiKey, maxRetries: 0 });
const base = { model, max_tokens: 8, temperature: 0, messages: [{ role: 'user', content: 'Say hello — grüß Gott, 你好.' }] };
const tools = [{
  name: 'get_weather', description: 'The weather of a city',
  input_schema: { type: 'object', required: ['city'], properties: { city: { type: 'string', enum: ['Rome', 'Oslo'] } } },
}];
const toolCall = { ...base, max_tokens: 200, tools, tool_choice: { type: 'tool', name: 'get_weather' } };

await step('messages', async () => {
  const { data, response } = await client.messages.create(base).withResponse();
  return { data, headers: headers(response.headers) };
});
await step('messages.system', () => client.messages.create({ ...base, system: [{ type: 'text', text: 'Be brief.' }], messages: [{ role: 'user', content: [{ type: 'text', text: 'one' }, { type: 'text', text: 'two' }] }] }));
await step('stream', async () => {
  const { data, response } = await client.messages.create({ ...base, stream: true }).withResponse();
  return { ...await collect(data), headers: headers(response.headers) };
});
await step('stream.helper', () => client.messages.stream(base).finalMessage());
await step('stream.abort', async () => {
  const s = await client.messages.create({ ...base, max_tokens: 400, stream: true });
  let n = 0;
  for await (const _ of s) if (++n === 4) s.controller.abort();
  return { ended: true };
});
await step('after.abort', () => client.messages.create(base));
await step('tools', () => client.messages.create(toolCall));
await step('tools.stream', async () => collect(await client.messages.create({ ...toolCall, stream: true })));
await step('tools.stream.helper', () => client.messages.stream(toolCall).finalMessage());
await step('tools.answer', () => client.messages.create({
  ...base, tools,
  messages: [...base.messages,
    { role: 'assistant', content: [{ type: 'tool_use', id: 'toolu_1', name: 'get_weather', input: { city: 'Rome' } }] },
    { role: 'user', content: [{ type: 'tool_result', tool_use_id: 'toolu_1', content: '21 °C' }] }],
}));
await step('count_tokens', () => client.messages.countTokens({ model, messages: base.messages }));
await step('error.model', () => client.messages.create({ ...base, model: 'no-such-model' }));
await step('error.messages', () => client.messages.create({ ...base, messages: 'not a list' }));

if (faults) {
  await step('fault.500', () => client.messages.create({ ...base, ...fault('500') }));
  await step('fault.529.stream', () => client.messages.create({ ...base, stream: true, ...fault('529') }));
  await step('fault.inband', async () => collect(await client.messages.create({ ...base, stream: true, ...fault('inband=3') })));
  await step('fault.cut', async () => collect(await client.messages.create({ ...base, stream: true, ...fault('cut=3') })));
  await step('fault.split', async () => collect(await client.messages.create({ ...base, stream: true, ...fault('split') })));
}

if (gateway) {
  await step('gateway.key', () => new Anthropic({ baseURL: root, apiKey: 'not a key', maxRetries: 0 }).messages.create(base));
  await step('gateway.bearer', async () => (await new Anthropic({ baseURL: root, apiKey: null, authToken: apiKey, maxRetries: 0 }).messages.create(base)).type);
}
