package openai

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
)

// TestSampling: what decides whether the same body gets the same answer is read, and nothing is
// refused for it.
func TestSampling(t *testing.T) {
	hot := math.Inf(1)
	for _, c := range []struct {
		body string
		kind Kind
		want Sampling
	}{
		{`{}`, Chat, Sampling{N: 1}},
		{`{"temperature":null,"seed":null,"n":null}`, Chat, Sampling{N: 1}},
		{`{"temperature":0}`, Chat, Sampling{N: 1, HasTemperature: true}},
		{`{"temperature":-0.0}`, Chat, Sampling{N: 1, HasTemperature: true}},
		{`{"temperature":0e9}`, Chat, Sampling{N: 1, HasTemperature: true}},
		{`{"temperature":0.7,"n":3}`, Chat, Sampling{N: 3, Temperature: .7, HasTemperature: true}},
		{`{"temperature":7e-1,"best_of":3}`, Completion, Sampling{N: 1, Temperature: .7, HasTemperature: true}},
		{`{"\u0074emperature":2}`, Response, Sampling{N: 1, Temperature: 2, HasTemperature: true}},
		{`{"temperature":1e-30}`, Message, Sampling{N: 1, Temperature: 1e-30, HasTemperature: true}},
		{`{"temperature":1e999}`, Chat, Sampling{N: 1, Temperature: hot, HasTemperature: true}},
		{`{"temperature":-1}`, Chat, Sampling{N: 1, Temperature: hot, HasTemperature: true}},
		{`{"temperature":"0"}`, Chat, Sampling{N: 1, Temperature: hot, HasTemperature: true}},
		{`{"temperature":false}`, Chat, Sampling{N: 1, Temperature: hot, HasTemperature: true}},
		{`{"temperature":[0]}`, Chat, Sampling{N: 1, Temperature: hot, HasTemperature: true}},
		{`{"temperature":0.` + strings.Repeat("0", maxDecimal) + `}`, Chat, Sampling{N: 1, Temperature: hot, HasTemperature: true}},
		{`{"seed":0}`, Chat, Sampling{N: 1, HasSeed: true}},
		{`{"seed":42}`, Completion, Sampling{N: 1, HasSeed: true}},
		{`{"seed":42}`, Response, Sampling{N: 1, HasSeed: true}},
		{`{"seed":42}`, Message, Sampling{N: 1}}, // ignored there
		{`{"metadata":{"temperature":1,"seed":1,"n":9}}`, Chat, Sampling{N: 1}},
		{`{"Temperature":1,"Seed":1}`, Chat, Sampling{N: 1}},
	} {
		if got := metered(t, c.kind, c.body).Sampling; got != c.want {
			t.Errorf("%s:\ngot  %+v\nwant %+v", c.body, got, c.want)
		}
	}
}

func TestStore(t *testing.T) {
	for _, c := range []struct {
		body       string
		kind       Kind
		store, has bool
	}{
		{`{}`, Chat, false, false},
		{`{}`, Response, true, false},
		{`{"store":null}`, Response, true, false},
		{`{"store":false}`, Response, false, true},
		{`{"store":true}`, Response, true, true},
		{`{"store":true}`, Chat, true, true},
		{`{"store":false}`, Chat, false, true},
		{`{"store":"false"}`, Chat, true, true}, // as some server may read it
		{`{"store":0}`, Response, true, true},
	} {
		if r := metered(t, c.kind, c.body); r.Store != c.store || r.HasStore != c.has {
			t.Errorf("%s: %v, %v", c.body, r.Store, r.HasStore)
		}
	}
}

// TestOutside: the field by which an answer depends on more than the body is named.
func TestOutside(t *testing.T) {
	part := func(p string) string {
		return `{"messages":[{"role":"user","content":[{"type":"text","text":"x"},` + p + `]}]}`
	}
	item := func(i string) string { return `{"input":[` + i + `]}` }
	for _, c := range []struct {
		kind       Kind
		body, want string
	}{
		{Chat, `{"model":"m","messages":[{"role":"system","name":"x","content":"x"},{"role":"assistant","content":null,"audio":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"https://x"}],"tools":[{"type":"function","function":{"name":"f"}}],"documents":[{"url":"https://x"}],"chat_template":"{{ x }}","mm_processor_kwargs":{},"cache_salt":"x","background":false}`, ""},
		{Response, `{"previous_response_id":"resp_1"}`, "previous_response_id"},
		{Response, `{"previous_response_id":null,"conversation":null,"tools":null,"prompt":null}`, ""},
		{Response, `{"conversation":"conv_1"}`, "conversation"},
		{Response, `{"conversation":{"id":"conv_1"}}`, "conversation"},
		{Response, `{"c\u006fnversation":{"id":"conv_1"}}`, "conversation"},
		{Response, `{"Conversation":{"id":"conv_1"}}`, "conversation"},
		{Response, `{"\u212aV_transfer_params":{}}`, "kv_transfer_params"},
		{Response, `{"prompt":{"id":"p"}}`, "prompt"},
		{Completion, `{"prompt":"p"}`, ""},
		{Response, item(`{"type":"message","id":"m","role":"user","content":"x"}`), ""},
		{Response, item(`{"id":"m","role":"user","content":"x"}`), ""},
		{Response, item(`{"type":"item_reference","id":"x"}`), "item_reference"},
		{Response, item(`{"id":"x"}`), "item_reference"},
		{Response, item(`{"type":null,"id":"x"}`), "item_reference"},
		{Response, item(`{"type":"function_call_output","call_id":"c","output":"x"}`), ""},
		{Response, item(`{"type":"computer_call_output","output":{"type":"computer_screenshot","file_id":"f"}}`), "file_id"},
		{Response, item(`{"role":"user","content":[{"type":"input_image","image_url":"data:image/png;base64,QUJD"}]}`), ""},
		{Response, item(`{"role":"user","content":[{"type":"input_image","image_url":"https://x","file_id":null}]}`), "image_url"},
		{Response, item(`{"role":"user","content":[{"type":"input_image","image_url":null,"file_id":"f"}]}`), "file_id"},
		{Response, item(`{"role":"user","content":[{"type":"input_file","file_data":"data:x","filename":"x.pdf"}]}`), ""},
		{Response, item(`{"role":"user","content":[{"type":"input_file","file_url":"https://x"}]}`), "file_url"},
		{Response, `{"tools":[{"type":"function","name":"f"},{"type":"custom","name":"g"}]}`, ""},
		{Response, `{"tools":[{"type":"web_search"}]}`, "tools"},
		{Response, `{"TOOLS":[{"type":"web_search"}]}`, "tools"},
		{Message, `{"tools":[{"type":"web_search_20250305","name":"web_search"}]}`, "tools"},
		{Message, `{"mcp_servers":[{"url":"x"}]}`, "mcp_servers"},
		{Message, `{"container":"c"}`, "container"},
		{Chat, `{"web_search_options":{}}`, "web_search_options"},
		{Chat, `{"search_parameters":{"mode":"auto"}}`, "search_parameters"},
		{Chat, `{"plugins":[{"id":"web"}]}`, "plugins"},
		{Chat, `{"kv_transfer_params":{"do_remote_prefill":true}}`, "kv_transfer_params"},
		{Chat, `{"chat_template":"{{ strftime_now('%d') }}"}`, "chat_template"},
		{Chat, `{"messages":[{"role":"assistant","audio":{"id":"audio_1"}}]}`, "audio"},
		{Chat, part(`{"type":"image_url","image_url":{"url":"data:image/png;base64,QUJD","detail":"low"}}`), ""},
		{Chat, part(`{"type":"image_url","image_url":{"url":"DATA:image/png;base64,QUJD"}}`), ""},
		{Chat, part(`{"type":"image_url","image_url":{"url":"https://x"}}`), "image_url"},
		{Chat, part(`{"type":"image_url","image_url":{"\u0075rl":"https://x"}}`), "image_url"},
		{Chat, part(`{"type":"image_url","image_url":{"data":"QUJD","\u0075rl":"https://x"}}`), "image_url"},
		{Chat, part(`{"type":"image_url","image_url":"https://x"}`), "image_url"},
		{Chat, part(`{"type":"image_url","image_url":{}}`), "image_url"},
		{Chat, part(`{"type":"image_url","image_url":null,"uuid":"u"}`), "uuid"},
		{Chat, part(`{"type":"image_url","image_url":{"url":"data:image/png;base64,QUJD"},"uuid":"u"}`), "uuid"},
		{Chat, part(`{"type":"video_url"}`), "uuid"},
		{Chat, part(`{"type":"image_embeds","image_embeds":"QUJD","uuid":null}`), ""},
		{Chat, part(`{"type":"input_audio","input_audio":{"data":"QUJD","format":"wav"}}`), ""},
		{Chat, part(`{"type":"audio_url","audio_url":{"url":"https://x"}}`), "audio_url"},
		{Chat, part(`{"type":"video_url","video_url":{"url":"data:video/mp4;base64,QUJD"}}`), ""},
		{Chat, part(`{"type":"file","file":{"file_id":"f"}}`), "file"},
		{Chat, part(`{"type":"file","file":{"filename":"a.pdf","file_data":"data:application/pdf;base64,QUJD"}}`), ""},
		{Message, part(`{"type":"image","source":{"type":"base64","media_type":"image/png","data":"QUJD"},"cache_control":{"type":"ephemeral"}}`), ""},
		{Message, part(`{"type":"image","source":{"type":"url","url":"https://x"}}`), "url"},
		{Message, part(`{"type":"document","source":{"type":"file","file_id":"f"}}`), "file_id"},
		{Message, part(`{"type":"document","source":{"type":"text","data":"x"}}`), ""},
		{Message, part(`{"type":"container_upload","file_id":"f"}`), "file_id"},
		{Message, part(`{"type":"tool_result","tool_use_id":"t","content":[{"type":"image","source":{"type":"url","url":"https://x"}}]}`), "url"},
	} {
		if got := metered(t, c.kind, c.body).Outside; got != c.want {
			t.Errorf("%s: %q, want %q", c.body, got, c.want)
		}
	}
}

// TestCacheSalt: a body without a salt of its own gets one, on the routes that know it.
func TestCacheSalt(t *testing.T) {
	for _, c := range []struct {
		kind       Kind
		body, want string
	}{
		{Chat, `{"messages":[]}`, `{"cache_salt":"s\"1","messages":[]}`},
		{Completion, `{"prompt":"x"}`, `{"cache_salt":"s\"1","prompt":"x"}`},
		{Response, ` { }`, ` {"cache_salt":"s\"1" }`},
		{Chat, `{"cache_salt":"own"}`, `{"cache_salt":"own"}`},
		{Chat, `{"\u0063ache_salt":"own"}`, `{"\u0063ache_salt":"own"}`},
		{Chat, `{"cache_salt":5}`, `{"cache_salt":5}`},
		{Chat, `{"a":1,"cache_salt": null }`, `{"a":1,"cache_salt": "s\"1" }`},
		{Chat, `{"metadata":{"cache_salt":"x"}}`, `{"cache_salt":"s\"1","metadata":{"cache_salt":"x"}}`},
		{Message, `{"messages":[]}`, `{"messages":[]}`},
		{Embedding, `{"input":"x"}`, `{"input":"x"}`},
		{Pooling, `{"input":"x"}`, `{"input":"x"}`},
	} {
		r := metered(t, c.kind, c.body)
		if got := string(bytes.Join(r.Pieces([]byte(c.body), Changes{CacheSalt: `s"1`}), nil)); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
	body := []byte(`{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":false},"max_tokens":100,"max_completion_tokens":null,"cache_salt":null,"model":"x"}`)
	r := metered(t, Chat, string(body))
	const all = `{"stream":true,"stream_options":{"continuous_usage_stats":false,"include_usage":true},"max_tokens":7,"max_completion_tokens":7,"cache_salt":"s","model":"up"}`
	if got := string(bytes.Join(r.Pieces(body, Changes{Model: "up", IncludeUsage: true, Cap: 7, CacheSalt: "s"}), nil)); got != all {
		t.Errorf("all changes at once:\ngot  %s\nwant %s", got, all)
	}
	if got := string(bytes.Join(metereds(t, `{}`).Pieces([]byte(`{}`), Changes{Model: "up", Cap: 7, CacheSalt: "s"}), nil)); got != `{"model":"up","max_tokens":7,"cache_salt":"s"}` {
		t.Errorf("all members missing: %s", got)
	}
	form := []byte(formOf("model", "w"))
	f, err := MeterMultipart(boundary, form)
	if err != nil || !bytes.Equal(bytes.Join(f.Pieces(form, Changes{CacheSalt: "s"}), nil), form) {
		t.Errorf("a form was changed: %v", err)
	}
}

func metereds(t *testing.T, body string) *Request {
	r := metered(t, Chat, body)
	return &r
}

// TestMeterAllocates: what decides whether an answer may be kept is read without garbage.
func TestMeterAllocates(t *testing.T) {
	count := func(body string) float64 {
		b := []byte(body)
		return testing.AllocsPerRun(100, func() {
			if _, err := Meter(Chat, b); err != nil {
				t.Fatal(err)
			}
		})
	}
	plain := count(`{"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"new_part","new_parts":{"url":"data:x"}}]}],"presenceness":0.25,"more":7,"keeps":false,"new_field1":"x"}`)
	if more := count(`{"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"data:x"}}]}],"temperature":0.25,"seed":7,"store":false,"cache_salt":"x"}`); more > plain {
		t.Errorf("%v allocations, %v without", more, plain)
	}
}

// readsAlike holds what the meter found for the cache against what the standard library reads.
func readsAlike(t *testing.T, kind Kind, body []byte, r *Request) {
	t.Helper()
	var m map[string]any
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		t.Fatal(err)
	}
	s, given := r.Sampling, m["temperature"]
	if s.HasTemperature != (given != nil) || math.IsNaN(s.Temperature) || s.Temperature < 0 || s.HasSeed && m["seed"] == nil || s.N < 1 {
		t.Errorf("%q: %+v", body, s)
	}
	if n, ok := given.(json.Number); ok {
		if f, err := n.Float64(); f > s.Temperature || err != nil && !math.IsInf(s.Temperature, 1) {
			t.Errorf("%q: temperature %v, want %v", body, s.Temperature, n)
		}
	}
	if given == nil && s.Temperature != 0 || m["store"] == true && !r.Store || m["store"] == false && r.Store || m["store"] == nil && r.HasStore {
		t.Errorf("%q: %+v, store %v", body, s, r.Store)
	}
	if id, _ := m["previous_response_id"].(string); id != "" && r.Outside == "" || m["conversation"] != nil && r.Outside == "" {
		t.Errorf("%q: nothing outside", body)
	}
	salted := bytes.Join(r.Pieces(body, Changes{CacheSalt: "fuzz"}), nil)
	var after map[string]any
	d = json.NewDecoder(bytes.NewReader(salted))
	if err := d.Decode(&after); err != nil {
		t.Fatalf("%q became %q: %v", body, salted, err)
	}
	own := m["cache_salt"] != nil || kind != Chat && kind != Completion && kind != Response
	if own != bytes.Equal(body, salted) || !own && after["cache_salt"] != "fuzz" {
		t.Errorf("%q became %q", body, salted)
	}
}
