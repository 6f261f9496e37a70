package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

func joined(pieces [][]byte) string { return string(bytes.Join(pieces, nil)) }

func TestSplitInputs(t *testing.T) {
	for _, c := range []struct {
		body string
		each []string // the value of input in the Body of each element
	}{
		{`{"input":"a\u00e4"}`, []string{`["a\u00e4"]`}},
		{`{"model":"m","input" : ["a" , "b"],"dimensions":8}`, []string{`["a"]`, `["b"]`}},
		{`{"input":[1, 22,3]}`, []string{`[[1, 22,3]]`}},
		{`{"input":[[1],[2,3]],"encoding_format":"base64","user":"u"}`, []string{`[[1]]`, `[[2,3]]`}},
		{`{"input":["\"],["],"encoding_format":null}`, []string{`["\"],["]`}},
	} {
		in, ok := SplitInputs([]byte(c.body))
		if !ok || in.Len() != len(c.each) {
			t.Errorf("%s: %v, %d inputs", c.body, ok, in.Len())
			continue
		}
		all := make([]int, in.Len())
		start, end := in.at.start, in.at.end
		for i, value := range c.each {
			all[i] = i
			if got, want := joined(in.Body(i)), c.body[:start]+value+c.body[end:]; got != want {
				t.Errorf("input %d of %s: %s, want %s", i, c.body, got, want)
			}
		}
		want := "[" + strings.ReplaceAll(strings.Join(c.each, ","), "],[", ",") + "]"
		want = c.body[:start] + want[1:len(want)-1] + c.body[end:]
		if strings.Contains(c.body, "[[1],[2,3]]") {
			want = c.body
		}
		if got := joined(in.Body(all...)); got != want && !strings.Contains(c.body, `\"`) {
			t.Errorf("all of %s: %s, want %s", c.body, got, want)
		}
	}
	many := `"x"` + strings.Repeat(`,"x"`, maxInputs-1)
	if in, ok := SplitInputs([]byte(`{"input":[` + many + `]}`)); !ok || in.Len() != maxInputs {
		t.Errorf("as many as allowed: %v, %d", ok, in.Len())
	}
	for _, body := range []string{
		`{}`, `{"input":null}`, `{"input":5}`, `{"input":{}}`, `{"input":[]}`, `{"input":[[]]}`, `{"input":[null]}`, `{"input":["a",[1]]}`, `{"input":["a",1]}`, `{"input":[1,"a"]}`, `{"input":[[1],"a"]}`,
		`{"input":[-1]}`, `{"input":[1.0]}`, `{"input":[1e3]}`, `{"input":[[1,-2]]}`, `{"input":[[[1]]]}`, `{"input":[{"content":"x"}]}`, `{"input":[true]}`,
		`{"input":"a","encoding_format":"bytes"}`, `{"input":"a","encoding_format":5}`, `{"input":"a","late_chunking":true}`, `{"input":"a","messages":[]}`, `{"\u0069nput":"a"}`, `{"input":"a","m\u006fdel":"m"}`,
		`{"input":"a","metadata":"` + strings.Repeat("u", maxRest) + `"}`, `{"input":[` + many + `,"x"]}`,
	} {
		if _, err := Meter(Embedding, []byte(body)); err != nil {
			t.Errorf("%.80s: %v", body, err)
		}
		if _, ok := SplitInputs([]byte(body)); ok {
			t.Errorf("%.80s was split", body)
		}
	}
}

func TestShares(t *testing.T) {
	in, ok := SplitInputs([]byte(`{"input":["a","` + strings.Repeat("b", 97) + `","",""]}`))
	if !ok {
		t.Fatal("not split")
	}
	for _, c := range []struct {
		total   int64
		indices []int
		want    []int64
	}{
		{102, []int{0, 1, 2, 3}, []int64{2, 98, 1, 1}},
		{5, []int{0}, []int64{5}},
		{3, []int{2, 3}, []int64{1, 2}},
		{0, []int{1, 0}, []int64{0, 0}},
		{maxFigure, []int{2, 3}, []int64{maxFigure / 2, maxFigure / 2}},
		{7, nil, []int64{}},
	} {
		if got := in.Shares(c.total, c.indices...); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%d among %v: %v, want %v", c.total, c.indices, got, c.want)
		}
	}
	if in, _ = SplitInputs([]byte(`{"input":[[1],[2,3,4]]}`)); !reflect.DeepEqual(in.Shares(4, 0, 1), []int64{1, 3}) {
		t.Errorf("ids: %v", in.Shares(4, 0, 1))
	}
}

func TestSplitEmbeddings(t *testing.T) {
	const usage = `"usage":{"prompt_tokens":3,"total_tokens":3}`
	one := func(members string) string {
		return `{"object":"list","data":[{` + members + `}],"model":"m",` + usage + `}`
	}
	e, ok := SplitEmbeddings([]byte(` { "id":"e","object" : "list","created":1,"data": [ {"index":1,"embedding":"QUJD+/==","object":"embedding"} , {"object":"embedding","index":0,"embedding":[ 1, -0.5e-7 ,0]}],"model":"\u006d","usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0,"prompt_tokens_details":null},"error":null} `), 2)
	if !ok || e.Model != "m" || e.Usage != (Usage{Input: 3, Known: true}) || string(e.Elements[0]) != `[ 1, -0.5e-7 ,0]` || string(e.Elements[1]) != `"QUJD+/=="` {
		t.Errorf("%v, %+v", ok, e)
	}
	if _, ok := SplitEmbeddings([]byte(one(`"index":0,"embedding":[1]`)), 1); !ok {
		t.Error("the plainest one")
	}
	for _, c := range []struct {
		answer string
		n      int
	}{
		{one(`"index":0,"embedding":[1]`), 0},
		{one(`"index":0,"embedding":[1]`), 2},
		{one(`"index":0,"embedding":[1]`) + "x", 1},
		{strings.TrimSuffix(one(`"index":0,"embedding":[1]`), "}"), 1},
		{one(`"index":1,"embedding":[1]`), 1},
		{one(`"index":-1,"embedding":[1]`), 1},
		{one(`"index":0.0,"embedding":[1]`), 1},
		{one(`"index":99999999999999999999,"embedding":[1]`), 1},
		{one(`"index":0,"index":0,"embedding":[1]`), 1},
		{one(`"index":0,"embedding":[1],"embedding":[1]`), 1},
		{one(`"index":0`), 1},
		{one(`"embedding":[1]`), 1},
		{one(`"index":0,"embedding":[]`), 1},
		{one(`"index":0,"embedding":null`), 1},
		{one(`"index":0,"embedding":[null]`), 1},
		{one(`"index":0,"embedding":[NaN]`), 1},
		{one(`"index":0,"embedding":[1,]`), 1},
		{one(`"index":0,"embedding":[01]`), 1},
		{one(`"index":0,"embedding":[1 2]`), 1},
		{one(`"index":0,"embedding":[[1]]`), 1},
		{one(`"index":0,"embedding":["1"]`), 1},
		{one(`"index":0,"embedding":""`), 1},
		{one(`"index":0,"embedding":"a\"b"`), 1},
		{one(`"index":0,"embedding":{"int8":[1]}`), 1},
		{one(`"index":0,"embedding":[1],"object":"x"`), 1},
		{one(`"index":0,"embedding":[1],"truncated":true`), 1},
		{one(`"index":0,"embedding":[1]},{"index":0,"embedding":[1]`), 2},
		{one(`"index":0,"embedding":[1]},`), 1},
		{`{"data":[{"index":0,"embedding":[1]}],"model":"m"}`, 1},
		{`{"data":[{"index":0,"embedding":[1]}],"model":"m","usage":{}}`, 1},
		{`{"data":[{"index":0,"embedding":[1]}],"model":"m","usage":{"prompt_tokens":-1}}`, 1},
		{`{"data":[{"index":0,"embedding":[1]}],` + usage + `}`, 1},
		{`{"data":{},"model":"m",` + usage + `}`, 1},
		{`{"model":"m",` + usage + `}`, 1},
		{`{"data":[{"index":0,"embedding":[1]}],"data":[],"model":"m",` + usage + `}`, 1},
		{`{"data":[{"index":0,"embedding":[1]}],"model":"m",` + usage + `,"warning":"x"}`, 1},
		{`{"data":[{"index":0,"embedding":[1]}],"model":"m",` + usage + `,"error":{"message":"x"}}`, 1},
		{`{"object":"error","data":[{"index":0,"embedding":[1]}],"model":"m",` + usage + `}`, 1},
		{"", 1},
		{"[]", 1},
		{"{", 1},
		{`{"data":[`, 1},
	} {
		if e, ok := SplitEmbeddings([]byte(c.answer), c.n); ok {
			t.Errorf("%s (%d): %+v", c.answer, c.n, e)
		}
	}
}

// TestJoinEmbeddings: what was split and joined again says the same as before.
func TestJoinEmbeddings(t *testing.T) {
	for name, n := range map[string]int{"embeddings": 2, "embeddings_b64": 1} {
		raw, err := os.ReadFile("testdata/vllm-sim/" + name + ".response.raw")
		if err != nil {
			t.Fatal(err)
		}
		_, answer, _ := bytes.Cut(raw, []byte("\r\n\r\n"))
		e, ok := SplitEmbeddings(answer, n)
		if !ok {
			t.Fatalf("%s was not split: %s", name, answer)
		}
		sameJSON(t, JoinEmbeddings(e.Elements, e.Model, e.Usage), answer)
	}
	const want = `{"object":"list","data":[],"model":"a\"b","usage":{"prompt_tokens":7,"total_tokens":7}}`
	if got := string(JoinEmbeddings(nil, `a"b`, Usage{Input: 7})); got != want {
		t.Errorf("got %s", got)
	}
	elements := [][]byte{[]byte(`[1,2]`), []byte(`"QUJD"`), []byte(`[3]`)}
	if n := testing.AllocsPerRun(10, func() { JoinEmbeddings(elements, "model", Usage{Input: 1 << 40}) }); n > 1 {
		t.Errorf("%v allocations", n)
	}
}

func sameJSON(t *testing.T, got, want []byte) {
	t.Helper()
	var a, b any
	if err := json.Unmarshal(got, &a); err != nil {
		t.Fatalf("%s: %v", got, err)
	}
	if err := json.Unmarshal(want, &b); err != nil {
		t.Fatalf("%s: %v", want, err)
	}
	if !reflect.DeepEqual(a, b) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// FuzzSplitInputs: the bodies of single inputs ask for what the whole body asked for.
func FuzzSplitInputs(f *testing.F) {
	for _, s := range []string{`{"input":"a","model":"m"}`, `{"input":["a","b\""],"dimensions":8}`, `{"input":[1,2]}`, `{"input":[[1], [2,3]],"encoding_format":"base64"}`, `{"input":[1,"a"]}`, `{"input":[]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if _, err := Meter(Embedding, body); err != nil {
			return
		}
		in, ok := SplitInputs(body)
		if !ok {
			return
		}
		inputs, rest := readInputs(t, body)
		if _, isID := inputs[0].(float64); isID {
			inputs = []any{inputs}
		}
		all, shared := make([]int, in.Len()), int64(0)
		for i := range all {
			all[i] = i
			one, also := readInputs(t, []byte(joined(in.Body(i))))
			if len(one) != 1 || !reflect.DeepEqual(one[0], inputs[i]) || !reflect.DeepEqual(also, rest) {
				t.Errorf("input %d of %q: %v %v", i, body, one, also)
			}
		}
		if again, also := readInputs(t, []byte(joined(in.Body(all...)))); !reflect.DeepEqual(again, inputs) || !reflect.DeepEqual(also, rest) {
			t.Errorf("all of %q: %v", body, again)
		}
		for _, x := range in.Shares(1000, all...) {
			if shared += x; x < 0 {
				t.Errorf("%q: a share of %d", body, x)
			}
		}
		if shared != 1000 {
			t.Errorf("%q: %d of 1000 shared", body, shared)
		}
	})
}

func readInputs(t *testing.T, body []byte) (inputs []any, rest map[string]any) {
	t.Helper()
	if err := json.Unmarshal(body, &rest); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	inputs, ok := rest["input"].([]any)
	if !ok {
		inputs = []any{rest["input"]}
	}
	delete(rest, "input")
	return inputs, rest
}

// FuzzSplitEmbeddings: whatever a server sends, what is kept of it joins to sound JSON that says
// the same.
func FuzzSplitEmbeddings(f *testing.F) {
	for _, s := range []string{
		`{"object":"list","data":[{"object":"embedding","index":0,"embedding":[1,-2.5e-3]},{"object":"embedding","index":1,"embedding":"QUI="}],"model":"m","usage":{"prompt_tokens":3,"total_tokens":3}}`,
		`{"data":[{"index":0,"embedding":[1]}],"model":"\ud800","usage":{"total_tokens":1}}`, `{"data":[{"index":0,"embedding":[1,]}],"model":"m","usage":{"prompt_tokens":1}}`,
	} {
		f.Add([]byte(s), 2)
		f.Add([]byte(s), 1)
	}
	f.Fuzz(func(t *testing.T, answer []byte, n int) {
		e, ok := SplitEmbeddings(answer, n)
		if !ok {
			return
		}
		again := JoinEmbeddings(e.Elements, e.Model, e.Usage)
		var got, sent struct {
			Data []struct {
				Index     int
				Embedding any
			}
		}
		if err := json.Unmarshal(again, &got); err != nil || len(got.Data) != n {
			t.Fatalf("%q became %q: %v", answer, again, err)
		}
		if twice, ok := SplitEmbeddings(again, n); !ok || !reflect.DeepEqual(twice.Elements, e.Elements) || twice.Usage.Input != e.Usage.Input {
			t.Errorf("%q became %q", answer, again)
		}
		if json.Unmarshal(answer, &sent) != nil { // elsewhere than in what is kept
			return
		}
		for _, s := range sent.Data {
			if !reflect.DeepEqual(got.Data[s.Index].Embedding, s.Embedding) || got.Data[s.Index].Index != s.Index {
				t.Errorf("%q became %q", answer, again)
			}
		}
	})
}

func BenchmarkEmbeddings(b *testing.B) {
	elements := make([][]byte, 100)
	for i := range elements {
		elements[i] = []byte("[" + strings.Repeat("-0.0123456789,", 1535) + "1]")
	}
	answer := JoinEmbeddings(elements, "m", Usage{Input: 100})
	body := fmt.Appendf(nil, `{"model":"m","input":["%s"%s]}`, strings.Repeat("x", 1000), strings.Repeat(`,"`+strings.Repeat("x", 1000)+`"`, 99))
	b.Run("SplitInputs", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		b.ReportAllocs()
		for b.Loop() {
			if in, ok := SplitInputs(body); !ok || in.Len() != 100 {
				b.Fatal(in.Len())
			}
		}
	})
	b.Run("SplitEmbeddings", func(b *testing.B) {
		b.SetBytes(int64(len(answer)))
		b.ReportAllocs()
		for b.Loop() {
			if _, ok := SplitEmbeddings(answer, 100); !ok {
				b.Fatal("not split")
			}
		}
	})
	b.Run("JoinEmbeddings", func(b *testing.B) {
		b.SetBytes(int64(len(answer)))
		b.ReportAllocs()
		for b.Loop() {
			JoinEmbeddings(elements, "m", Usage{Input: 100})
		}
	})
}
