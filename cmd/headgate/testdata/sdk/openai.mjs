// The openai package, as applications use it.
import OpenAI, { toFile } from 'openai';
import { apiKey, baseURL, collect, describe, embedModel, embedURL, fault, faults, gateway, headers, model, step } from './harness.mjs';

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const embedder = new OpenAI({ baseURL: embedURL, apiKey, maxRetries: 0 });
const messages = [{ role: 'user', content: 'Say hello — grüß Gott, 你好.' }];
const base = { model, messages, max_tokens: 8, temperature: 0, seed: 7 };
const parameters = {
  type: 'object', additionalProperties: false, required: ['city', 'days'],
  properties: { city: { type: 'string', enum: ['Rome', 'Oslo'] }, days: { type: 'integer', minimum: 1, maximum: 9 } },
};
const tools = [{ type: 'function', function: { name: 'get_weather', description: 'The weather of a city', parameters } }];
const toolCall = { ...base, tools, tool_choice: { type: 'function', function: { name: 'get_weather' } }, max_tokens: 200 };
const chat = (more) => client.chat.completions.create({ ...base, ...more });
const withHeaders = async (promise) => {
  const { data, response } = await promise.withResponse();
  return { data, headers: headers(response.headers) };
};

await step('models', async () => (await client.models.list()).data);

await step('chat', () => withHeaders(chat()));
await step('chat.choices', () => chat({ n: 2, logprobs: true, top_logprobs: 2, max_tokens: 3, temperature: 1 }));
await step('chat.parts', () => chat({ messages: [{ role: 'system', content: 'Be brief.' }, { role: 'user', content: [{ type: 'text', text: 'one' }, { type: 'text', text: 'two' }] }] }));
await step('chat.max_completion_tokens', () => chat({ max_tokens: undefined, max_completion_tokens: 3 }));
await step('chat.schema', () => chat({ max_tokens: 200, response_format: { type: 'json_schema', json_schema: { name: 'trip', strict: true, schema: parameters } } }));
await step('chat.extra_fields', () => chat({ chat_template_kwargs: { enable_thinking: false }, top_k: 1, min_tokens: 1, user: 'u1' }));

await step('stream', async () => {
  const { data, response } = await chat({ stream: true }).withResponse();
  return { ...await collect(data), headers: headers(response.headers) };
});
await step('stream.usage', async () => collect(await chat({ stream: true, stream_options: { include_usage: true } })));
await step('stream.no_usage', async () => collect(await chat({ stream: true, stream_options: { include_usage: false } })));
await step('stream.continuous_usage', async () => collect(await chat({ stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } })));
await step('stream.choices', async () => {
  const { chunks, ...rest } = await collect(await chat({ stream: true, n: 2, max_tokens: 3, temperature: 1 }));
  if (!Array.isArray(chunks)) return { ...rest, chunks };
  return { ...rest, chunks: chunks.sort((a, b) => (a.choices[0]?.index ?? 9) - (b.choices[0]?.index ?? 9)) }; // choices interleave as they please
});
await step('stream.helper', () => client.chat.completions.stream(base).finalChatCompletion());
await step('stream.abort', async () => {
  const s = await chat({ stream: true, max_tokens: 400 });
  let n = 0;
  for await (const _ of s) if (++n === 2) s.controller.abort();
  return { ended: true };
});
await step('after.abort', () => chat());

await step('tools', () => client.chat.completions.create(toolCall));
await step('tools.stream', async () => collect(await client.chat.completions.create({ ...toolCall, stream: true })));
await step('tools.stream.helper', () => client.chat.completions.stream(toolCall).finalChatCompletion());
await step('tools.answer', () => chat({
  tools,
  messages: [...messages,
    { role: 'assistant', content: null, tool_calls: [{ id: 'call_1', type: 'function', function: { name: 'get_weather', arguments: '{"city":"Rome","days":2}' } }] },
    { role: 'tool', tool_call_id: 'call_1', content: '21 °C' }],
}));

await step('completions', () => client.completions.create({ model, prompt: 'Once upon', max_tokens: 5, temperature: 0 }));
await step('completions.batch', () => client.completions.create({ model, prompt: ['Once', 'upon a'], max_tokens: 3, temperature: 0 }));
await step('completions.stream', async () => collect(await client.completions.create({ model, prompt: 'Once upon', max_tokens: 5, temperature: 0, stream: true })));

await step('embeddings', async () => { // the library asks for base64 and decodes it
  const r = await embedder.embeddings.create({ model: embedModel, input: ['a b', 'c'] });
  return { ...r, data: r.data.map((d) => ({ ...d, embedding: [...d.embedding] })) };
});
await step('embeddings.float', () => embedder.embeddings.create({ model: embedModel, input: 'a b', encoding_format: 'float' }));

let first;
await step('responses', async () => (first = await client.responses.create({ model, input: 'hi', max_output_tokens: 8, temperature: 0 })));
await step('responses.stream', async () => collect(await client.responses.create({ model, input: 'hi', max_output_tokens: 8, temperature: 0, stream: true })));
await step('responses.retrieve', () => client.responses.retrieve(first.id));
await step('responses.next', () => client.responses.create({ model, input: 'and then?', previous_response_id: first.id, max_output_tokens: 8, temperature: 0 }));

await step('audio', async () => client.audio.transcriptions.create({ model, file: await toFile(new Uint8Array(64), 'a.wav') }));

await step('error.model', () => chat({ model: 'no-such-model' }));
await step('error.model.stream', () => chat({ model: 'no-such-model', stream: true }));
await step('error.messages', () => chat({ messages: 'not a list' }));
await step('error.context', () => chat({ max_tokens: 1_000_000 }));
await step('error.cap', () => chat({ max_tokens: -1 }));
await step('error.stream_options', () => chat({ stream_options: { include_usage: true } }));

if (faults) {
  await step('fault.400', () => chat(fault('400')));
  await step('fault.429', () => chat(fault('429')));
  await step('fault.500', () => chat(fault('500')));
  await step('fault.503.stream', () => chat({ stream: true, ...fault('503') }));
  await step('fault.inband', async () => collect(await chat({ stream: true, ...fault('inband=3') })));
  await step('fault.cut', async () => collect(await chat({ stream: true, ...fault('cut=3') })));
  await step('fault.split', async () => collect(await chat({ stream: true, ...fault('split') })));
  await step('fault.crlf', async () => collect(await chat({ stream: true, ...fault('crlf') })));
  await step('fault.comments', async () => collect(await chat({ stream: true, ...fault('comments') })));
  await step('fault.gzip', () => chat(fault('gzip')));
  await step('fault.gzip.stream', async () => collect(await chat({ stream: true, ...fault('gzip') })));
  await step('fault.nousage.stream', async () => collect(await chat({ stream: true, ...fault('nousage') })));
  await step('fault.timeout', () => client.chat.completions.create({ ...base, ...fault('stall=0') }, { timeout: 300 }));
  await step('fault.stall.abort', async () => {
    const s = await chat({ stream: true, ...fault('stall=2') });
    let n = 0, error;
    try {
      for await (const c of s) if (c.choices[0]?.delta?.content && ++n === 2) s.controller.abort();
    } catch (e) {
      error = describe(e);
    }
    return { n, error };
  });
}

if (gateway) {
  await step('gateway.key', () => new OpenAI({ baseURL, apiKey: 'not a key', maxRetries: 0 }).chat.completions.create(base));
  await step('gateway.request_id', async () => typeof (await chat().withResponse()).request_id);
  await step('gateway.model', async () => (await client.models.retrieve(model)).id === model);
}
