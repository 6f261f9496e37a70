// What each library does with a refusal. Prints, per call, the status and the retry
// headers of every try.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import Anthropic from '@anthropic-ai/sdk';
import { generateText } from 'ai';
import OpenAI from 'openai';
import { apiKey, baseURL, counted, describe, model } from './harness.mjs';

const messages = [{ role: 'user', content: 'hi' }];
const root = baseURL.replace(/\/v1$/, '');
const libraries = {
  openai: (fetch) => new OpenAI({ baseURL, apiKey, fetch }).chat.completions.create({ model, messages, max_tokens: 2 }),
  'openai.stream': (fetch) => new OpenAI({ baseURL, apiKey, fetch }).chat.completions.create({ model, messages, max_tokens: 2, stream: true }).then(async (s) => { for await (const _ of s); }),
  anthropic: (fetch) => new Anthropic({ baseURL: root, apiKey, fetch }).messages.create({ model, messages, max_tokens: 2 }),
  aisdk: (fetch) => generateText({ model: createOpenAICompatible({ name: 'local', baseURL, apiKey, fetch })(model), messages, maxOutputTokens: 2 }),
};

const [fetch, tries] = counted();
let error;
try {
  const library = process.argv[2];
  for (let n = Number(process.argv[3] ?? 1); n > 0; n--) await libraries[library](fetch);
} catch (e) {
  error = describe(e);
}
console.log(JSON.stringify({ tries, error }));
