// Package contentlog keeps prompts and answers of the tenants whose policy asks for it, in
// files of its own and never in the process log.
//
// # Files
//
// A folder holds JSON lines in files named STEM.YYYY-MM-DD.NNNN.jsonl, mode 0600: the tenant's
// name with everything but small letters, digits, '_' and '-' as %XX (a long name is cut and
// ended by a digest), the UTC day on which the requests began, and a number that rises when a
// file has reached its size. A body that is whole and valid JSON stands as JSON under
// "request" or "answer"; anything else, event streams among it, stands as a string under
// "request_text" or "answer_text".
//
// # Sharing a folder
//
// Several processes of one machine may use a folder at once: nodes that write, and commands
// that export or erase. What changes a file holds the exclusive flock on ".lock" in the
// folder; a writer takes it for each batch and opens its files anew under it, so that it
// never appends to a file which somebody else has replaced. A reader holds the shared lock
// only to open a file and note its length; it then reads that much at leisure: what stands
// is only ever appended to, or replaced as a whole by a rename. The lock is taken for one
// file at a time, so an erasure of a large folder delays a writer by one file at most.
//
// # Invariants
//
//   - Redaction happens in memory before a byte is written.
//   - Keep never blocks: entries that the queue cannot take are counted and dropped.
//   - An erasure or a crash in it leaves every file either as it was or rewritten.
//   - An entry is gone an hour after its retention at the latest, while a node runs; entries
//     that stand behind a younger one (requests are written when they end) wait for that one.
//     Files of a tenant without a policy go after DefaultRetention.
//   - An erasure also removes lines that cannot be read, in the files it looks through:
//     nobody can say that they were not the person's.
//
// # What it leaves out
//
// Redaction is a net with holes: it knows the usual spellings of addresses, phone and card
// numbers, sees through JSON escapes (nested ones too) and across the frames of an event
// stream, but not through images, base64, URL encoding or prose. The envelope (tenant, user,
// key, …) is not redacted: a user must be found to be erased. Appended lines are not synced
// to disk: a power cut may lose the last ones, and a torn last line is cut off by the next
// append. An erasure by another process does not reach entries that wait in a node's queue;
// Log.Erase of that node does.
package contentlog
