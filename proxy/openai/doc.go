// Package openai is the wire room: it reads what clients send and what model servers
// answer, in OpenAI's shapes, vLLM's and Anthropic's, and changes as little of it as it
// can. It decides nothing: no limit, price or route is known here.
//
//   - [Meter] and [MeterMultipart] find in one request what it may cost; [Request.Pieces]
//     makes the few changes that the gateway needs.
//   - [Stream] reads server-sent events, [Scanner] a whole JSON answer, as they pass.
//   - [ParseUsage] gives every usage shape one meaning.
//   - [Assembler] makes one JSON answer of a stream, [Replay] a stream of one, and [Inspect]
//     says what an answer is: whole, cut off, refused, a call of tools.
//   - [Request.Prefix] says how the prompt begins, in hashes, for whoever looks for a server that has seen it.
//   - [SplitInputs], [SplitEmbeddings] and [JoinEmbeddings] take embeddings apart, one an input.
//
// # How a body is read
//
// Metering takes two linear sweeps over a body in memory. The first holds it against RFC
// 8259 by jsontext, at about 1 GB/s and without garbage: syntax, UTF-8, surrogates, one
// value. The second walks what is now known to be sound, at about the same speed, and
// looks for meaning. jsontext alone would do, were it not for its search for duplicate
// names, which takes 185 MB and .4 s on a body of a million names; the walk's own one
// takes 3 MiB at its bound. Reading jsontext's tokens instead of walking was as fast on
// prose, but takes an allocation for each string with an escape. Together the sweeps
// take 2 ms for 1 MB of messages, 2.5 µs for 1 KB.
//
// What an upstream sent is walked without validation: it passes as it is, sound or not,
// and of what is not sound nothing is believed.
//
// # What holds
//
//   - Two parsers that read an accepted body agree on every field that costs. So these
//     are refused, with the field and the byte offset: duplicate names, in every object
//     at every depth, after escapes are resolved; our names in other case; numbers as
//     strings, 1 for true and the like, which servers coerce each in its own way; bytes
//     that are not UTF-8, lone surrogates, byte order marks, NaN, anything behind the
//     object; numbers beyond 2^53. Whole numbers in other spellings (16.0, 1.6e1) are
//     taken, exactly. 0 is a cap; null is no cap.
//   - Every string is text unless it is known not to become prompt: media payloads of
//     content parts, a few top-level fields (metadata, ids), short roles and types. Tools,
//     schemas and template arguments, which are rendered as JSON, count with their
//     names. Too high an estimate is settled back; too low a one lets a caller pass.
//     An image_url is a medium in a content part only, never in a tool's schema.
//   - What costs nothing is never refused: temperature, seed, store and cache_salt are read as they
//     come, and where servers differ in their reading, as what keeps an answer out of a cache.
//   - Pieces changes the model name, the caps, a missing cache_salt and the usage options of a
//     stream and no other byte.
//     A stream that asked for continuous_usage_stats without include_usage, to which
//     vLLM gives nothing, would get them on every chunk once include_usage is added;
//     Pieces turns them off, so that only one chunk is added, which Stream hides.
//   - The bytes out of a Stream are the bytes in, less that chunk: one that has an empty
//     list of choices, a usage and no error. Where they were cut makes no difference.
//   - Usage is the last one seen, never a sum. Input counts cached tokens once:
//     OpenAI's figure has them in it, Anthropic's has not. A figure that is negative,
//     fractional, no number or above 2^40 makes its report unknown.
//   - What is assembled says what the stream said, to the last member, and what is replayed
//     what the answer says; a member that is not known, a name twice, an order that makes
//     no sense is refused, not guessed. Left out are null and empty members only, what is
//     the same for every answer (padding, pings) and what its server, too, leaves out of a
//     stream whose request did not ask for the usage (its fingerprint and timings).
//   - A replay's texts are cut otherwise than they were, logprobs excepted, and choices
//     follow each other; client libraries see no other difference.
//   - Time is linear and memory bounded: nesting by maxDepth, names by maxNames, frames
//     by MaxFrame, what a Scanner keeps by maxCapture, a form's fields by maxFields,
//     what an Assembler keeps by its caller.
//
// # What is left out
//
//   - Tokenizing. InputBytes and InputTokens are for an estimate made elsewhere.
//   - Decompression and character sets: bodies are identity-coded UTF-8 here.
//   - Whether a request makes sense: unknown fields, roles and models pass.
//   - Answers with tools that the server runs, with sound, with tokens as numbers or with
//     what filters found: neither assembled nor replayed. Nor is the usage replayed on every
//     chunk, which nobody remembers.
//   - Forms in the full width of RFC 7578: no preamble, encoded names, transfer
//     encodings or fields of ours that occur twice.
//   - Names with escapes in what an upstream sends. No server writes its own field names
//     that way; usage under such a name is not seen.
//   - A server forced to report usage (vLLM's --enable-force-include-usage) reports it on
//     every chunk: that passes. Its last chunk is hidden like ours from those who did
//     not ask.
//
// # How it fails
//
// A request fails with [*InputError], whose text may be shown to the client. Streams and
// scanners do not fail: a frame that cannot be read passes unread, one longer than
// MaxFrame passes in pieces as it comes (a long last event of /v1/responses is still
// understood, by a Scanner), and what was not learnt shows as a Usage that is not Known.
// [Stream.Generated] then says what was seen passing: a token for each delta, which is
// exact where a server sends one token a chunk and too low where it sends several.
package openai
