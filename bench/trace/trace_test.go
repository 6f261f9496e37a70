package trace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/proxy/journal"
)

func readText(t *testing.T, text string, format Format) *Trace {
	t.Helper()
	tr, err := Read(strings.NewReader(text), format, Options{Name: "x"})
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// short is a trace in a word a request: milliseconds, tenant, input and output.
func short(t *Trace) string {
	var words []string
	for _, r := range t.Requests {
		tenant := "-"
		if t.Tenants != nil {
			tenant = t.Tenants[r.Tenant]
		}
		words = append(words, strings.Join([]string{strconv.FormatInt(r.At.Milliseconds(), 10), tenant, strconv.FormatInt(r.Input, 10), strconv.FormatInt(r.Output, 10)}, "/"))
	}
	return strings.Join(words, " ")
}

// TestFormats reads each format, told and not told which it is.
func TestFormats(t *testing.T) {
	const usageHead = "time,started,request_id,tenant,key,input_tokens,cached_input_tokens,output_tokens,outcome\r\n"
	for _, c := range []struct {
		name   string
		format Format
		text   string
		want   string
	}{
		{"our own", CSV, "time,tenant,input_tokens,output_tokens\n5,a,10,1\n5.25,b,20,0\n6,a,0,0\n", "0/a/10/1 250/b/20/0 1000/a/0/0"},
		{"other columns and another order", CSV, "\ufeffmodel,output_tokens,time,tenant,input_tokens\nm,1,0,\"a, b\",10\nm,2,1e1,c,20\n", "0/a, b/10/1 10000/c/20/2"},
		{"dates", CSV, "time,tenant,input_tokens,output_tokens\n2026-01-15T08:00:00+01:00,a,1,1\n2026-01-15T07:00:00.5Z,a,1,1\n", "0/a/1/1 500/a/1/1"},
		{"no tenants", CSV, "time,input_tokens,output_tokens\n0,1,1\n1,1,1\n", "0/-/1/1 1000/-/1/1"},
		{"azure 2023", Azure, "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109", "0/-/374/44 4314/-/396/109"},
		{"azure 2024", Azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n", "0/-/2162/5 990/-/2399/6"},
		{
			"mooncake", Mooncake,
			`{"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": [0, 1]}` + "\n" +
				`{"timestamp": 3000, "input_length": 600, "output_length": 1, "hash_ids": [0, 2]}` + "\n\n" +
				`{"timestamp": 6000, "input_length": 600, "output_length": 2, "hash_ids": [0, 3]}` + "\n",
			"0/-/600/0 1500/-/600/1 3000/-/600/2",
		},
		{
			"usage as CSV, by the time when it ended, with one that was guarded, one that crashed and what was lost", Usage,
			usageHead +
				"2026-01-15T08:00:09Z,2026-01-15T08:00:08Z,req_2,'=b,k,20,0,2,ok\r\n" +
				"2026-01-15T08:00:10Z,2026-01-15T08:00:01Z,req_1,a,k,10,0,1,ok\r\n" +
				"2026-01-15T08:00:11Z,,,,,0,0,0,lost\r\n" +
				"2026-01-15T08:00:12Z,,req_3,a,k,30,0,3,crashed\r\n",
			"0/a/10/1 7000/=b/20/2 11000/a/30/3",
		},
		{
			"usage as JSON", Usage,
			`{"time":"2026-01-15T08:00:09Z","started":"2026-01-15T08:00:08Z","request_id":"req_2","tenant":"b","input_tokens":20,"output_tokens":2,"outcome":"ok"}` + "\n" +
				`{"time":"2026-01-15T08:00:10Z","started":"2026-01-15T08:00:01Z","request_id":"req_1","tenant":"a","input_tokens":10,"output_tokens":1,"outcome":"ok"}` + "\n",
			"0/a/10/1 7000/b/20/2",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := short(readText(t, c.text, c.format)); got != c.want {
				t.Errorf("%s, not %s", got, c.want)
			}
			if got := short(readText(t, c.text, "")); got != c.want {
				t.Errorf("not told which format: %s, not %s", got, c.want)
			}
		})
	}
}

// TestUsageOfOurs reads what the usage log's own encoder writes.
func TestUsageOfOurs(t *testing.T) {
	began := time.Date(2026, 1, 15, 8, 0, 0, 0, time.UTC)
	for _, format := range []string{"csv", "json"} {
		var b bytes.Buffer
		e, err := journal.NewEncoder(&b, format, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range []journal.Usage{
			{Time: began.Add(9 * time.Second), Started: began.Add(time.Second / 2), RequestID: "r1", Tenant: "=a,", Input: 10, Output: 1, Outcome: "ok"},
			{Time: began.Add(9 * time.Second), Outcome: journal.Lost, Reserved: 5},
			{Time: began.Add(10 * time.Second), Started: began, RequestID: "r2", Tenant: "b", Input: 20, CachedInput: 15, Output: 2, Outcome: "client_gone"},
		} {
			if err := e.Usage(&u); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.Flush(); err != nil {
			t.Fatal(err)
		}
		if got, want := short(readText(t, b.String(), "")), "0/b/20/2 500/=a,/10/1"; got != want {
			t.Errorf("%s: %s, not %s", format, got, want)
		}
		b.Reset()
		if e, err = journal.NewEncoder(&b, format, []string{"tenant"}); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(e.Row(&journal.Row{Values: []string{"a"}, Requests: 3}), e.Flush()); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(&b, Usage, Options{Name: "x"}); err == nil || !strings.Contains(err.Error(), "without --by") {
			t.Errorf("%s: sums: %v", format, err)
		}
	}
}

// TestWrong: an error says where it is and what to write instead.
func TestWrong(t *testing.T) {
	const head = "time,tenant,input_tokens,output_tokens\n"
	const mooncake = `{"timestamp":5,"input_length":600,"output_length":1,"hash_ids":[0,1]}` + "\n"
	for _, c := range []struct {
		format Format
		text   string
		words  []string
	}{
		{CSV, "", []string{"x:1: it is empty", "the first line names the columns"}},
		{CSV, "time,tenant,input_tokens\n", []string{"x:1: column output_tokens: it is missing", "must name time, input_tokens, output_tokens, and names time, tenant, input_tokens"}},
		{CSV, "time,time,input_tokens,output_tokens\n", []string{"x:1: column time: two columns"}},
		{CSV, head, []string{"x: fewer than two requests"}},
		{CSV, head + "0,a,1,1\n1,a,many,1\n", []string{`x:3: column input_tokens: "many" is no whole number`}},
		{CSV, head + "0,a,1,1\n1,a,1,1.5\n", []string{`x:3: column output_tokens: "1.5" is no whole number`}},
		{CSV, head + "0,a,-1,1\n", []string{"x:2: column input_tokens: -1 is not from 0", "write how many"}},
		{CSV, head + "0,a,1,9999999999\n", []string{"x:2: column output_tokens: 9999999999 is not from 0"}},
		{CSV, head + "noon,a,1,1\n", []string{`x:2: column time: "noon" is no time`, "RFC 3339"}},
		{CSV, head + "-1,a,1,1\n", []string{`x:2: column time: "-1" is no time`}},
		{CSV, head + "NaN,a,1,1\n", []string{`x:2: column time: "NaN" is no time`}},
		{CSV, head + "1600-01-01T00:00:00Z,a,1,1\n", []string{"x:2: column time", "before 1970"}},
		{CSV, head + "1,a,1,1\n0.5,a,1,1\n", []string{"x:3: column time: it is before that of the line in front: sort"}},
		{CSV, head + "1,a,1,1\n2026-01-15T08:00:00Z,a,1,1\n", []string{"x:3: column time: some lines have seconds and some a date"}},
		{CSV, head + "1,a,1,1\n1700000000,a,1,1\n", []string{"x:3: column time: it is too large: more than 400 days", "check the unit"}},
		{CSV, head + "1,,1,1\n", []string{"x:2: column tenant: it is empty", "leave the whole column out"}},
		{CSV, head + "1," + strings.Repeat("n", 257) + ",1,1\n", []string{"x:2: column tenant", "more than 256 bytes"}},
		{CSV, head + "1,\"a\nb\",1,1\n", []string{`x:2: column tenant: "a\nb" is not UTF-8 that can be printed`}},
		{CSV, head + "1,a,1,1\n1,a,1\n", []string{"x:3: there are not as many cells", "which has 4"}},
		{CSV, head + "1,a\"b,1,1\n", []string{"x:2: column 4: bare \"", "RFC 4180"}},
		{CSV, head + "1,\"" + strings.Repeat("endless\n", 1<<18) + "\",1,1\n", []string{"x:2: the line has more than 1048576 bytes"}},
		{Azure, head, []string{"x:1: column TIMESTAMP: it is missing", "is it of the format csv?"}},
		{Mooncake, mooncake, []string{"x: fewer than two"}},
		{Mooncake, mooncake + strings.Replace(mooncake, "5", "4", 1), []string{"x:2: column timestamp: it is before"}},
		{Mooncake, strings.Replace(mooncake, "[0,1]", "[]", 1), []string{"x:1: columns input_length and hash_ids"}},
		{Mooncake, strings.Replace(mooncake, "[0", "[-1", 1), []string{"x:1: column hash_ids: the hash id -1"}},
		{Mooncake, strings.Replace(mooncake, "600", `"many"`, 1), []string{"x:1: column input_length: string can't be read"}},
		{Mooncake, "{", []string{"x:1: ", "write an object a line"}},
		{Mooncake, "{\"\":\"" + strings.Repeat("x", 1<<20), []string{"x:1: the line has more than"}},
		{Usage, "tenant,requests,input_tokens,output_tokens\n", []string{"x:1: these are sums: export without --by"}},
		{Usage, `{"tenant":"a","requests":3,"input_tokens":20,"output_tokens":2}`, []string{"x:1: these are sums: export without --by"}},
		{Usage, "started,input_tokens,output_tokens\n", []string{"x:1: column request_id: it is missing: the first line must name"}},
		{Usage, `{"tenant":"a","input_tokens":20,"output_tokens":2}`, []string{"x:1: column request_id: it is missing: give what"}},
		{Mooncake, head, []string{"x:1: it does not begin with an object", "is it of the format csv?"}},
		{Azure, mooncake, []string{"x:1: ", "is it of the format mooncake?"}},
		{"parquet", head, []string{"x:1: there is no format \"parquet\": it is one of csv, azure, mooncake, usage"}},
	} {
		_, err := Read(strings.NewReader(c.text), c.format, Options{Name: "x"})
		for _, w := range c.words {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%.60q: the error lacks %q: %.300v", c.text, w, err)
			}
		}
	}
}

// TestRoundTrip: what is written is read again as it was.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 40).Draw(rt, "requests")
		want := &Trace{Name: "x", Split: "as the file names them"}
		index := make(map[string]int32)
		at := time.Duration(0)
		for range n {
			name := rapid.StringMatching("[a-c ,\"'=\u00e4]{1,3}").Draw(rt, "tenant")
			k, known := index[name]
			if !known {
				k = int32(len(want.Tenants))
				index[name] = k
				want.Tenants = append(want.Tenants, name)
			}
			want.Requests = append(want.Requests, Request{
				At: at, Tenant: k, Session: k,
				Input: rapid.Int64Range(0, MaxTokens).Draw(rt, "input"), Output: rapid.Int64Range(0, MaxTokens).Draw(rt, "output"),
			})
			at += time.Duration(rapid.Int64Range(0, int64(2*24*time.Hour)).Draw(rt, "gap"))
		}
		var b bytes.Buffer
		if err := want.Write(&b); err != nil {
			rt.Fatal(err)
		}
		got, err := Read(&b, "", Options{Name: "x"})
		if err != nil {
			rt.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			rt.Fatalf("%+v, not %+v", got, want)
		}
	})
}

// TestFirst reads only the beginning, and says so where that is too little.
func TestFirst(t *testing.T) {
	const text = "time,tenant,input_tokens,output_tokens\n1,a,1,1\n2,a,1,1\n3,a,1,1\nnot read\n"
	tr, err := Read(strings.NewReader(text), CSV, Options{First: 2 * time.Second})
	if err != nil || len(tr.Requests) != 2 || tr.Span() != time.Second {
		t.Fatalf("%v, %v", tr, err)
	}
	if _, err := tr.Head(time.Second); err == nil || !strings.Contains(err.Error(), "fewer than two") {
		t.Errorf("a head of one request: %v", err)
	}
	tr.Name = "half"
	if got := tr.String(); got != "half: 2 requests in 1s, 2 tokens each, of 1 tenants" {
		t.Error(got)
	}
}

// TestSpread: requests of one tick are parted evenly over it, in their order.
func TestSpread(t *testing.T) {
	tr := Trace{Requests: []Request{{At: 0}, {At: 0}, {At: 0}, {At: 3000}, {At: 6000}, {At: 6000}}}
	tr.spread()
	want := []time.Duration{0, 1000, 2000, 3000, 6000, 7500}
	for i, r := range tr.Requests {
		if r.At != want[i] {
			t.Errorf("request %d at %d, not %d", i, r.At, want[i])
		}
	}
}

// TestSessions: conversations are told apart by their first block after those that all begin with.
func TestSessions(t *testing.T) {
	tr := Trace{Requests: []Request{
		{Blocks: []int32{0, 9, 1}}, {Blocks: []int32{0, 9, 2, 3}}, {Blocks: []int32{0, 9, 1, 4}}, {Blocks: []int32{0, 9, 2}}, {Blocks: []int32{0, 9}},
	}}
	tr.sessions()
	want := []int32{0, 1, 0, 1, 2}
	for i, r := range tr.Requests {
		if r.Session != want[i] {
			t.Errorf("request %d is of session %d, not %d", i, r.Session, want[i])
		}
	}
}

// TestSamples: they are there, in the publishers' words, and whose they are is said.
func TestSamples(t *testing.T) {
	for _, c := range []struct {
		name, source, says string
		sessions           int32
	}{
		{AzureSample, "CC BY 4.0", "azure: 4000 requests in 13m35s, 1437 tokens each", 4000},
		{MooncakeSample, "Apache-2.0", "mooncake: 3000 requests in 16m27s, 13866 tokens each", 2034},
	} {
		tr, err := Sample(c.name)
		if err != nil {
			t.Fatal(err)
		}
		sessions := int32(0)
		for _, r := range tr.Requests {
			sessions = max(sessions, r.Session+1)
		}
		if tr.String() != c.says || sessions != c.sessions || !strings.Contains(tr.Source, c.source) || tr.Tenants != nil {
			t.Errorf("%s; %d sessions; %s", tr, sessions, tr.Source)
		}
	}
	if _, err := Sample("other"); err == nil || !strings.Contains(err.Error(), "azure and mooncake") {
		t.Errorf("a sample that is not there: %v", err)
	}
	if tr, err := Load(AzureSample, "", Options{First: time.Minute}); err != nil || tr.Span() >= time.Minute || len(tr.Requests) < 100 || tr.Source == "" {
		t.Errorf("a minute of the sample: %v, %v", tr, err)
	}
	if _, err := Load("./azure", "", Options{}); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("a file of that name: %v", err)
	}
	for _, file := range []string{"README.md", "LICENSE.azure"} {
		if b, err := files.ReadFile("samples/" + file); err != nil || len(b) < 500 {
			t.Errorf("%s is not beside the samples: %v", file, err)
		}
	}
}

// TestOpen reads files, packed or not, and says which is wrong.
func TestOpen(t *testing.T) {
	const text = "time,tenant,input_tokens,output_tokens\n1,a,1,1\n2,b,1,1\n"
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, b := range map[string][]byte{"t.csv": []byte(text), "u.csv.gz": packed.Bytes(), "cut.csv.gz": packed.Bytes()[:packed.Len()-9], "short.csv": []byte(text[:len(text)-8])} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"t.csv": "t.csv", "u.csv.gz": "u.csv"} {
		tr, err := Open(filepath.Join(dir, name), "", Options{})
		if err != nil || tr.Name != want || !slices.Equal(tr.Tenants, []string{"a", "b"}) {
			t.Errorf("%s: %v, %v", name, tr, err)
		}
	}
	for name, want := range map[string]string{"cut.csv.gz": "cut.csv.gz:", "short.csv": "short.csv: fewer than two requests", "none": "no such file"} {
		if _, err := Open(filepath.Join(dir, name), "", Options{}); err == nil || !strings.Contains(err.Error(), want) || strings.Count(err.Error(), name) != 1 {
			t.Errorf("%s: %v", name, err)
		}
	}
}
