package gateway

import (
	"fmt"
	"strings"
	"time"
)

// Model is the one that all targets serve.
const model = "fake"

// The loads: the chunks of a stream, the bytes of every body, and the time between
// the chunks of a paced stream, without which they would travel many to a packet
// and a proxy's cost for each would not show.
const (
	streamChunks = 300
	chatBytes    = 1024
	chunkGap     = time.Millisecond
)

// chatBody is a chat of 1 KB, no two alike.
func chatBody(n int64) []byte { return bodyOf(n, `"max_tokens":32`) }

func streamBody(n int64) []byte {
	return bodyOf(n, fmt.Sprintf(`"stream":true,"max_tokens":%d`, streamChunks))
}

func pacedBody(n int64) []byte {
	return bodyOf(n, fmt.Sprintf(`"stream":true,"max_tokens":%d,"vllm_xargs":{"fake_fault":"slow"}`, streamChunks))
}

// heldBody is a stream that falls silent after its first token.
func heldBody(n int64) []byte {
	return bodyOf(n, `"stream":true,"max_tokens":32,"vllm_xargs":{"fake_fault":"stall=1"}`)
}

func bodyOf(n int64, members string) []byte {
	head := fmt.Sprintf(`{"model":%q,"temperature":0.7,%s,"messages":[{"role":"system","content":"You answer briefly."},{"role":"user","content":"%d `, model, members, n)
	const tail = `"}]}`
	const filler = "What does a gateway do all day, and does it ever sleep? "
	pad := max(0, chatBytes-len(head)-len(tail))
	text := strings.Repeat(filler, pad/len(filler)+1)[:pad]
	return []byte(head + text + tail)
}
