package cache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"headgate/cache"
)

const (
	lookKeys  = 4096     // looked up in turn
	lookBytes = 64 << 20 // of the caches in which
	batch     = 64       // operations between two looks at the clock
)

// speedSample is one measurement of an operation.
type speedSample struct {
	ns     float64 // that one takes, to who does it
	cpu    float64 // of this process, in ns: what is left of ns on a machine that has others to serve
	allocs float64
}

// operation is one that is timed. do returns false where it did not do what is timed.
type operation struct {
	name    string
	peer    string // the one of this name is what the ratio is to
	many    int    // goroutines
	do      func(turn int) bool
	samples []speedSample
}

type speedSection struct{ ops []*operation }

// speed times keys and look-ups in this process, one after the other in each round.
func speed(ctx context.Context, c *Config, _ *Report) (_ section, err error) {
	s := &speedSection{}
	s.ops = append(s.ops, keyOperations()...)
	looks, stop, err := lookOperations()
	if err != nil {
		return nil, err
	}
	defer stop()
	s.ops = append(s.ops, looks...)
	for round := range c.Rounds {
		for i := range s.ops {
			op := s.ops[(i+round)%len(s.ops)]
			sample, err := op.time(ctx, c.Each/8)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", op.name, err)
			}
			op.samples = append(op.samples, sample)
		}
	}
	return s, nil
}

// time runs the operation for a while.
func (o *operation) time(ctx context.Context, length time.Duration) (s speedSample, err error) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	counts, failed := make([]int, o.many), make([]bool, o.many)
	used, began := ownCPU(), time.Now()
	var wg sync.WaitGroup
	for g := range o.many {
		wg.Go(func() {
			turn := g * lookKeys / o.many
			for time.Since(began) < length && ctx.Err() == nil {
				for range batch {
					if !o.do(turn) {
						failed[g] = true
						return
					}
					turn++
				}
				counts[g] += batch
			}
		})
	}
	wg.Wait()
	took, used := time.Since(began), ownCPU()-used
	runtime.ReadMemStats(&after)
	n := 0
	for g, c := range counts {
		n += c
		if failed[g] {
			return s, errors.New("it does not do what is timed")
		}
	}
	if n == 0 {
		return s, errors.Join(errors.New("it was not done once"), ctx.Err())
	}
	return speedSample{
		ns: float64(took.Nanoseconds()) * float64(o.many) / float64(n), cpu: float64(used.Nanoseconds()) / float64(n),
		allocs: float64(after.Mallocs-before.Mallocs) / float64(n),
	}, nil
}

// sized names an amount of bytes.
func sized(n int) string { return fmt.Sprintf("%d KB", n>>10) }

// chatOf is a chat as an SDK sends it, of so many bytes.
func chatOf(size int) []byte {
	const head = `{"model":"meta-llama/Llama-3.1-8B-Instruct","messages":[{"role":"system","content":"You are a helpful assistant of Acme.\nAnswer in one sentence."},{"role":"user","content":"`
	const tail = `"}],"temperature":0.0,"max_tokens":256,"top_p":0.95,"stream":true,"stream_options":{"include_usage":true},"seed":42}`
	const text = "What is the return policy for items that were bought on sale? "
	return []byte(head + strings.Repeat(text, max(0, size-len(head)-len(tail))/len(text)) + tail)
}

// keyOperations derive keys, beside the least that a key could cost, and RFC 8785 as a library has it.
func keyOperations() (ops []*operation) {
	for _, size := range []int{1 << 10, 32 << 10} {
		body := chatOf(size)
		c := cache.Context{
			Tenant: "acme", Surface: "faq", Template: "7", Model: "meta-llama/Llama-3.1-8B-Instruct", ModelVersion: "2026-11", Backends: []string{"gpu-1", "gpu-2"},
			Generations: [4]uint64{1, 2, 3, 4}, Path: "/v1/chat/completions", Header: []string{"Openai-Beta: assistants=v2"}, Body: body,
		}
		key := "key, chat of " + sized(size)
		ops = append(ops, &operation{name: key, many: 1, do: func(int) bool {
			_, err := c.Key()
			return err == nil
		}})
		ops = append(ops, &operation{name: "  its SHA-256 alone, " + sized(size), peer: key, many: 1, do: func(int) bool {
			return sha256.Sum256(body) != [32]byte{}
		}})
		ops = append(ops, &operation{name: "  jsontext.Canonicalize and SHA-256, " + sized(size), peer: key, many: 1, do: func(int) bool {
			v := jsontext.Value(bytes.Clone(body))
			return v.Canonicalize() == nil && sha256.Sum256(v) != [32]byte{}
		}})
	}
	return ops
}

// lookOperations look entries up, in the store and in its peers.
func lookOperations() (ops []*operation, stop func(), err error) {
	var open []contender
	stop = func() {
		for _, c := range open {
			c.close()
		}
	}
	text := prose(8 << 10)
	fill := func(make func(int64) (contender, error), body []byte) (contender, error) {
		c, err := make(lookBytes)
		if err != nil {
			return nil, err
		}
		open = append(open, c)
		for i := range lookKeys {
			c.put(&cache.Entry{Key: keyOf(i), Tenant: "acme", Surface: "faq", ContentType: "application/json", Body: body, Life: cache.Life{TTL: time.Hour}})
		}
		return c, nil
	}
	keys := make([]cache.Key, lookKeys)
	for i := range keys {
		keys[i] = keyOf(i)
	}
	for _, k := range contenders() {
		c, err := fill(k.open, text[:1500])
		if err != nil {
			return nil, stop, err
		}
		found := func(turn int) bool { return c.get(&keys[turn%lookKeys]) }
		for _, many := range []int{1, max(2, runtime.NumCPU())} {
			ops = append(ops, &operation{name: lookName(k.name, many), peer: lookName(theStore, many), many: many, do: found})
		}
		if k.name != theStore {
			continue
		}
		absent := keyOf(-1)
		ops = append(ops, &operation{name: "look-up of what is not there, store", many: 1, do: func(int) bool { return !c.get(&absent) }})
		packed, err := fill(k.open, text)
		if err != nil {
			return nil, stop, err
		}
		ops = append(ops, &operation{name: "look-up of 8 KB, compressed, store", many: 1, do: func(turn int) bool { return packed.get(&keys[turn%lookKeys]) }})
	}
	return ops, stop, nil
}

func lookName(who string, many int) string {
	if many == 1 {
		return "look-up, " + who
	}
	return fmt.Sprintf("look-up by %d at once, %s", many, who)
}

// keyOf is the n-th key.
func keyOf(n int) cache.Key {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(n))
	return sha256.Sum256(b[:])
}

// prose shrinks as text does.
func prose(n int) []byte {
	r := rand.New(rand.NewPCG(9, 9))
	words := make([]string, 1500)
	for i := range words {
		for range 2 + r.IntN(8) {
			words[i] += string(rune('a' + r.IntN(26)))
		}
	}
	z := rand.NewZipf(r, 1.1, 4, uint64(len(words)-1))
	var text []byte
	for len(text) < n {
		text = append(append(text, words[z.Uint64()]...), ' ')
	}
	return text[:n]
}

func nsOf(s *speedSample) float64  { return s.ns }
func cpuOf(s *speedSample) float64 { return max(s.cpu, 1) }

func (s *speedSection) find(name string) *operation {
	for _, o := range s.ops {
		if o.name == name {
			return o
		}
	}
	return nil
}

func (s *speedSection) write(b *strings.Builder) {
	b.WriteString("keys and look-ups, in this process; the time is that of one to who does it, cpu that of the process for one; ours to it\n" +
		"is by cpu. Caches have 64 MiB and 4,096 entries of 1,500 bytes, looked up in turn.\n\n")
	fmt.Fprintf(b, "%-48s %10s %10s %10s %12s\n", "", "ns", "cpu ns", "allocs", "ours to it")
	for _, o := range s.ops {
		ratio := ""
		if p := s.find(o.peer); p != nil && p != o {
			ratio = fmt.Sprintf("%.2f", median(pairs(p.samples, o.samples, func(p, o *speedSample) float64 { return cpuOf(p) / cpuOf(o) })))
		}
		fmt.Fprintf(b, "%-48s %10.0f %10.0f %10.1f %12s\n", o.name, median(each(o.samples, nsOf)), median(each(o.samples, cpuOf)), median(each(o.samples, func(s *speedSample) float64 { return s.allocs })), ratio)
	}
}

func (s *speedSection) aims() (as []aim) {
	for _, a := range [...]struct {
		name string
		ns   float64
	}{{lookName(theStore, 1), 1000}, {lookName(theStore, max(2, runtime.NumCPU())), 1000}, {"key, chat of 1 KB", 3000}} {
		if o := s.find(a.name); o != nil {
			v := median(each(o.samples, cpuOf)) // which does not depend on what else the machine has to do
			as = append(as, aim{v <= a.ns, fmt.Sprintf("%s: %.2f µs of CPU (%.2f in all), aim ≤ %g", a.name, v/1000, median(each(o.samples, nsOf))/1000, a.ns/1000)})
		}
	}
	return as
}
