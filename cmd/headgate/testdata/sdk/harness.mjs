// What the scripts beside this file share: one JSON line per step on standard output,
// with everything in it that a second run against the same server must repeat.
//
// Environment: BASE_URL (ends in /v1), API_KEY, MODEL; EMBED_URL and EMBED_MODEL where
// embeddings come from another server or model.
// FAULTS=1: the server is fakevllm and goes wrong when a request asks it to.
// GATEWAY=1: the server is a gateway; steps run that only a gateway can answer.
// FOLD=1: how an answer is cut into chunks may differ between two runs.

const env = process.env;
export const baseURL = env.BASE_URL;
export const apiKey = env.API_KEY;
export const model = env.MODEL;
export const embedURL = env.EMBED_URL || baseURL;
export const embedModel = env.EMBED_MODEL || model;
export const faults = env.FAULTS === '1';
export const gateway = env.GATEWAY === '1';
const fold = env.FOLD === '1';

// step runs f and prints what it returned or threw.
export async function step(name, f) {
  const line = { step: name };
  try {
    line.result = await f();
  } catch (e) {
    line.error = describe(e);
  }
  console.log(JSON.stringify(scrub(line)));
}

// fault is the request member by which fakevllm is asked to go wrong; it passes through
// whatever drops unknown headers.
export const fault = (name) => ({ vllm_xargs: { fake_fault: name } });

// collect reads a stream to its end, or to the error that ends it, which it keeps: what
// arrived before an error counts as much as the error.
export async function collect(stream, pick = (c) => c) {
  const chunks = [];
  let error;
  try {
    for await (const c of stream) chunks.push(JSON.parse(JSON.stringify(pick(c))));
  } catch (e) {
    error = describe(e);
  }
  return { chunks: fold ? joined(chunks) : chunks, ...(error && { error }) };
}

// describe keeps of an error what programs branch on and what people read.
export function describe(e) {
  const d = { class: e?.constructor?.name, name: e?.name };
  for (const k of ['status', 'statusCode', 'code', 'type', 'param', 'isRetryable']) if (e?.[k] !== undefined) d[k] = e[k];
  d.message = String(e?.message ?? e);
  if (e?.error !== undefined) d.body = e.error;
  if (e?.data !== undefined) d.body = e.data;
  if (e?.cause?.message && e.cause !== e) d.cause = String(e.cause.message);
  return d;
}

// headers keeps those that a client library or its user acts upon.
export const headers = (h) => Object.fromEntries(['content-type', 'retry-after', 'retry-after-ms', 'x-should-retry']
  .filter((n) => h.get(n) !== null).map((n) => [n, h.get(n)]));

// counted is a fetch that notes the status and the retry headers of every try.
export function counted() {
  const tries = [];
  const f = async (...args) => {
    const r = await fetch(...args);
    tries.push({ status: r.status, ...headers(r.headers) });
    return r;
  };
  return [f, tries];
}

const ids = new Set(['id', 'item_id', 'response_id', 'tool_call_id', 'toolCallId', 'call_id', 'request_id', 'previous_response_id', 'parent']);
const clocks = new Set(['created', 'created_at', 'completed_at', 'timestamp']);

// scrub replaces what no two runs share. Equal ids stay equal within a step, so that a
// stream whose chunks carry different ids is told from one whose chunks carry the same.
function scrub(line) {
  const seen = new Map();
  const mark = (v) => {
    if (!seen.has(v)) seen.set(v, `#${seen.size + 1}`);
    return seen.get(v);
  };
  const walk = (v, key) => {
    if (Array.isArray(v)) return v.map((x) => walk(x));
    if (v && typeof v === 'object') return Object.fromEntries(Object.entries(v).map(([k, x]) => [k, walk(x, k)]));
    if (ids.has(key) && typeof v === 'string' && v !== model) return mark(v);
    if (clocks.has(key) && v !== null) return 'TIME';
    return v;
  };
  return walk(line);
}

// joined forgets where a text was cut: of each kind of chunk, one, with the texts of all
// run together; what the chunks ended with; and the last usage. A server that is not
// always equally fast puts the end now beside the last text, now into a chunk of its own.
function joined(chunks) {
  const kinds = new Map();
  const ends = [];
  let usage;
  for (const c of chunks) {
    let text = '';
    const kind = JSON.stringify(c, (k, v) => {
      if (['content', 'text', 'arguments', 'partial_json', 'delta', 'reasoning'].includes(k) && typeof v === 'string') {
        text += v;
        return undefined;
      }
      if (['finish_reason', 'stop_reason'].includes(k)) {
        if (v !== null) ends.push(v);
        return undefined;
      }
      if (k === 'usage') {
        usage = v ?? usage;
        return undefined;
      }
      return ['sequence_number', 'system_fingerprint'].includes(k) ? undefined : v;
    });
    kinds.set(kind, (kinds.get(kind) ?? '') + text);
  }
  return { ends, usage, kinds: [...kinds].map(([kind, text]) => ({ kind: JSON.parse(kind), text })) };
}
