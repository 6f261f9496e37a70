// Package fakevllm is a model server that answers like vLLM without a model: it
// speaks vLLM's HTTP routes, takes the time it is told to take, fails in the ways
// it is told to fail, and keeps a log of what reached it.
//
// # Purpose
//
// Tests of the gateway judge by what reached the upstream, so the upstream must
// count exactly. Benchmarks need an upstream that costs next to nothing. Both are
// the same server: [New] gives an [http.Handler], whose log and counters are read
// with [Server.Log] and [Server.Stats].
//
// # Answers
//
// The text of an answer is a function of the seed and the request body, byte for
// byte; so are ids and timestamps. Only the ids under /v1/responses also carry the
// number of the request, because they name stored objects. Words come from a fixed
// list that holds two-, three- and four-byte characters.
//
// # Tokens
//
//   - Prompt: one token for each 4 bytes of UTF-8 text, rounded up for each text;
//     3 more for each chat message and 2 for each chat; 256 for an image, 128 for
//     a sound, 512 for a video, whatever their bytes; tools and response schemas
//     count their JSON as text. Arrays of token ids count their elements.
//   - Output: a word of prose is one token. JSON (tool arguments, structured
//     output) is one token for each 4 bytes. Prose lasts for as many tokens as the
//     request's cap allows, ending with "length", or without a cap for
//     [Config.DefaultOutput] tokens, ending with "stop"; the caller may ask for
//     fewer with the header X-Fake-Output. One stream chunk carries one token.
//   - Cached: ⌊prompt · [Config.CachedFraction]⌋.
//
// # Scheduling
//
// [Config.Slots] requests run; the rest wait in order of arrival, as vLLM does,
// until [Config.MaxWaiting] of them wait and the next one is answered 429. A
// request leaves its slot just before its last bytes are written, so that a caller
// who answers an answer with the next request never sees itself counted twice.
// [Server.Hold] keeps running requests from answering until [Server.Release].
//
// # Faults
//
// See [Fault]. A fault strikes with the probability given in [Config.Faults], or
// because the request asks for it: header X-Fake-Fault, or the body member
// vllm_xargs.fake_fault, which gets past anything that drops unknown headers. Both
// take a comma-separated list of NAME or NAME=ARGUMENT.
//
// # Left out
//
// Sampling parameters do not influence the text, stop strings do not end it, and
// LoRA, beam search and reasoning are absent. Management routes answer and are
// recorded, but do nothing. Requests are not authenticated unless [Config.APIKey]
// is set.
//
// # How it fails
//
// A client that goes away ends its request at the next token or wait; the record
// then says [Aborted] and how many tokens were generated. Everything kept is
// bounded: the log by [Config.LogSize], bodies by [Config.MaxBody], stored
// responses by maxStored, stalls by [Config.StallMax].
package fakevllm
