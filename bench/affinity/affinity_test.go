package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"headgate/proxy/affinity"
)

const excerpt = "testdata/mooncake_excerpt.jsonl"

// TestOursFindsMore than load alone; told of all it finds more than a fixed bound, too. Either loads servers more evenly than
// a fixed bound and than none.
func TestOursFindsMore(t *testing.T) {
	tr, err := readTrace(excerpt)
	if err != nil {
		t.Fatal(err)
	}
	r := report{config: config{gateways: 3, seeds: 3, replicas: []int{4}, blocks: []int{400}, busy: []float64{0.8}}, trace: tr}
	if err := r.measure(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := r.cells[0]
	o, told := c.row(ours), c.row(oursTold)
	for _, name := range []string{roundRobin, leastLoaded, flat} {
		w := c.row(name)
		t.Logf("%s: hits %.3f, in flight %.2f; ours %.3f, %.2f; told %.3f, %.2f; one big cache %.3f", name, w.hit, w.spread, o.hit, o.spread, told.hit, told.spread, c.big)
		if name != flat && o.hit < 1.5*w.hit || told.hit <= w.hit {
			t.Errorf("ours finds %.3f, told %.3f, %s %.3f", o.hit, told.hit, name, w.hit)
		}
	}
	for _, name := range []string{flat, "2 leading blocks, no bound"} {
		if w := c.row(name); o.spread > w.spread || told.spread > w.spread {
			t.Errorf("in flight on the fullest to the mean: ours %.2f, told %.2f, %s %.2f", o.spread, told.spread, name, w.spread)
		}
	}
	if o.hit > c.big*1.05 || c.big == 0 {
		t.Errorf("ours finds %.3f, one big cache %.3f", o.hit, c.big)
	}
	again := run(tr, setting{4, 400, 3, 0.8, 1}, newRouter(3, 2, affinity.Config{}))
	if once := run(tr, setting{4, 400, 3, 0.8, 1}, newRouter(3, 2, affinity.Config{})); once != again {
		t.Errorf("two runs differ: %+v, %+v", once, again)
	}
}

// TestCommand takes every measurement of the excerpt and writes all that there is to write.
func TestCommand(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "results")
	var out bytes.Buffer
	if err := command(t.Context(), []string{"-trace", excerpt, "-out", dir, "-seeds", "1", "-gateways", "2"}, &out); err != nil {
		t.Fatal(err)
	}
	for name, words := range map[string][]string{
		"affinity.txt": {"300 requests", "one big cache", "8 servers of 2000 blocks, busy 1.1", "ours, told of all", "aims"},
		"affinity.csv": {"servers,blocks,busy", `8,2000,1.1,2,1,"ours",`},
		"affinity.svg": {"4 servers of 2000 blocks, busy 0.8", "polyline", "hits, of one big cache"},
	} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range words {
			if !strings.Contains(string(b), w) {
				t.Errorf("%s lacks %q", name, w)
			}
		}
		if name == "affinity.txt" && !bytes.Equal(b, out.Bytes()) {
			t.Error("what is written is not what is said")
		}
		if name == "affinity.svg" {
			wellFormed(t, b)
		}
	}
}

func wellFormed(t *testing.T, b []byte) {
	t.Helper()
	for d := xml.NewDecoder(bytes.NewReader(b)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func TestCommandRefuses(t *testing.T) {
	bad := func(text string) string {
		path := filepath.Join(t.TempDir(), "trace")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const line = `{"timestamp":5,"input_length":600,"output_length":1,"hash_ids":[0,1]}` + "\n"
	for _, c := range []struct {
		words string
		args  []string
	}{
		{"-trace: name the file", nil},
		{"-gateways 0", []string{"-gateways", "0"}},
		{"-seeds 51", []string{"-seeds", "51"}},
		{"no such file", []string{"-trace", "nowhere"}},
		{"fewer than two", []string{"-trace", bad(line)}},
		{":2: column timestamp: it is before", []string{"-trace", bad(line + strings.Replace(line, "5", "4", 1))}},
		{":1: columns input_length and hash_ids", []string{"-trace", bad(strings.Replace(line, "[0,1]", "[]", 1))}},
		{":1: column hash_ids: the hash id -1", []string{"-trace", bad(strings.Replace(line, "[0", "[-1", 1))}},
		{":1: ", []string{"-trace", bad("{")}},
	} {
		if err := command(t.Context(), c.args, io.Discard); err == nil || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%v: %v", c.args, err)
		}
	}
}

// TestChains: a turn ends where a request ends; the first block, which all have, is none.
func TestChains(t *testing.T) {
	tr := trace{ids: 10, requests: []request{
		{input: 1024, blocks: []int32{0, 1}},
		{input: 2000, blocks: []int32{0, 1, 2, 3}},
		{input: 2600, blocks: []int32{0, 1, 2, 4, 5, 6}},
		{input: 100, blocks: []int32{0}},
	}}
	tr.chains()
	for i, want := range [][]int32{{1}, {1, 2}, {1, 2, 5}, nil} {
		var hashes []uint64
		for _, id := range want {
			hashes = append(hashes, mix(uint64(id)))
		}
		if !slices.Equal(tr.requests[i].chain, hashes) {
			t.Errorf("request %d: %v, not the hashes of %v", i, tr.requests[i].chain, want)
		}
	}
}

// TestLRU holds the cache against a plain one.
func TestLRU(t *testing.T) {
	const ids, most = 40, 12
	rng := rand.New(rand.NewPCG(1, 2))
	c := newLRU(most, ids)
	var plain []int32 // the newest first
	for range 5000 {
		blocks := make([]int32, rng.IntN(16)+1)
		for i, id := range rng.Perm(ids)[:len(blocks)] {
			blocks[i] = int32(id)
		}
		want := 0
		for want < len(blocks) && slices.Contains(plain, blocks[want]) {
			want++
		}
		for _, id := range slices.Backward(blocks) {
			plain = slices.DeleteFunc(plain, func(p int32) bool { return p == id })
			plain = slices.Insert(plain, 0, id)
			plain = plain[:min(len(plain), most)]
		}
		if got := c.use(blocks); got != want {
			t.Fatalf("%v: %d are there, not %d", blocks, got, want)
		}
		for id := range int32(ids) {
			if c.in[id+1] != slices.Contains(plain, id) {
				t.Fatalf("block %d is there: %t, not %t", id, c.in[id+1], !c.in[id+1])
			}
		}
	}
}
