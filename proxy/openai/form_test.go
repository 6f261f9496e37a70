package openai

import (
	"bytes"
	"errors"
	"io"
	"mime/multipart"
	"strings"
	"testing"
)

const boundary = "XyZ"

// formOf writes a form by hand: name and value alternate; a name that ends in "@" is a file.
func formOf(fields ...string) string {
	var b strings.Builder
	for i := 0; i < len(fields); i += 2 {
		b.WriteString("--" + boundary + "\r\nContent-Disposition: form-data; name=\"")
		if name, ok := strings.CutSuffix(fields[i], "@"); ok {
			b.WriteString(name + "\"; filename=\"a.wav\"\r\nContent-Type: audio/wav")
		} else {
			b.WriteString(name + "\"")
		}
		b.WriteString("\r\n\r\n" + fields[i+1] + "\r\n")
	}
	return b.String() + "--" + boundary + "--\r\n"
}

func TestMeterMultipart(t *testing.T) {
	body := formOf("file@", "RIFF\r\n\x00--Xy", "model", "whisper", "prompt", "abc", "stream", "True", "language", "en", "max_completion_tokens", "7", "n", "3", "empty", "", "user", "u",
		"hotwords", strings.Repeat("w", 65), "stream_continuous_usage_stats", "1", "stream_include_usage", "false")
	r, err := MeterMultipart(boundary, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	if r.Sampling.N != 3 {
		t.Errorf("n is %d", r.Sampling.N)
	}
	r.spans, r.Bounds, r.Sampling = spans{}, Bounds{}, Sampling{}
	want := Request{Model: "whisper", HasModel: true, Stream: true, Continuous: true, MaxOutput: 7, Sequences: 3, InputBytes: 3 + 65, FileBytes: 11, Audio: 1, Inputs: 1, User: "u"}
	if r != want {
		t.Errorf("got  %+v\nwant %+v", r, want)
	}
}

func TestMeterMultipartReadsWhatClientsWrite(t *testing.T) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	part, _ := w.CreateFormFile("file", `Ärger "1".wav`)
	_, _ = part.Write(bytes.Repeat([]byte{0, '\r', '\n', '-'}, 100))
	_ = w.WriteField("model", "m")
	_ = w.Close()
	r, err := MeterMultipart(w.Boundary(), b.Bytes())
	if err != nil || r.Model != "m" || r.FileBytes != 400 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestMeterMultipartRefuses(t *testing.T) {
	good := formOf("file@", "x", "model", "m")
	for name, body := range map[string]string{
		"empty":                 "",
		"preamble":              "hello\r\n" + good,
		"cut in a header":       good[:30],
		"cut in a value":        strings.TrimSuffix(good, "--XyZ--\r\n"),
		"not closed":            strings.TrimSuffix(good, "--\r\n"),
		"bytes behind":          good + "x",
		"model twice":           formOf("model", "a", "model", "b"),
		"boundary in a value":   formOf("model", "a\r\n--XyZq"),
		"no line end of value":  strings.Replace(good, "m\r\n--", "--", 1),
		"transfer encoding":     strings.Replace(good, "Content-Type: audio/wav", "Content-Transfer-Encoding: base64", 1),
		"two dispositions":      strings.Replace(good, "Content-Type: audio/wav", "Content-Disposition: form-data; name=\"model\"", 1),
		"no disposition":        strings.Replace(good, "Content-Disposition", "X", 1),
		"escaped name":          strings.Replace(good, `"model"`, `"mo\del"`, 1),
		"encoded name":          strings.Replace(good, `"model"`, `"x"; name*=utf-8''model`, 1),
		"attachment":            strings.Replace(good, "form-data", "attachment", 1),
		"folded header":         strings.Replace(good, "\r\nContent-Type", "\r\n Content-Type", 1),
		"bare line feeds":       strings.ReplaceAll(good, "\r\n", "\n"),
		"too many fields":       formOf(append([]string{"x", "y"}, strings.Split(strings.Repeat("x,y,", maxFields), ",")[:2*maxFields]...)...),
		"long header":           strings.Replace(good, "a.wav", strings.Repeat("a", maxFieldHeader), 1),
		"stream neither":        formOf("stream", "maybe"),
		"cap with a sign":       formOf("max_tokens", "+5"),
		"cap beyond":            formOf("max_tokens", "9007199254740993"),
		"n beyond":              formOf("n", "1025"),
		"model beyond":          formOf("model", strings.Repeat("m", 1025)),
		"closing and more form": good + good,
	} {
		_, err := MeterMultipart(boundary, []byte(body))
		if _, ok := errors.AsType[*InputError](err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, b := range []string{"", strings.Repeat("b", 71), "a\r\nb"} {
		if _, err := MeterMultipart(b, []byte("--"+b+"\r\n")); err == nil {
			t.Errorf("boundary %q: accepted", b)
		}
	}
}

func TestEditMultipart(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"model", formOf("file@", "x", "model", "m"), formOf("file@", "x", "model", "up")},
		{"no model", formOf("file@", "x"), formOf("model", "up", "file@", "x")},
		{"empty model", formOf("model", ""), formOf("model", "up")},
		{"stream", formOf("model", "up", "stream", "true"), formOf("stream_include_usage", "true", "model", "up", "stream", "true")},
		{"stream and no model", formOf("stream", "true"), formOf("model", "up", "stream_include_usage", "true", "stream", "true")},
		{"usage off", formOf("stream", "1", "stream_include_usage", "false", "stream_continuous_usage_stats", "true", "model", "m"), formOf("stream", "1", "stream_include_usage", "true", "stream_continuous_usage_stats", "false", "model", "up")},
		{"usage on", formOf("stream", "1", "stream_include_usage", "on", "model", "up"), formOf("stream", "1", "stream_include_usage", "on", "model", "up")},
	} {
		r, err := MeterMultipart(boundary, []byte(c.in))
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got := string(edited(&r, []byte(c.in), "up", true)); got != c.want {
			t.Errorf("%s: got %q\nwant %q", c.name, got, c.want)
		}
	}
}

func FuzzMultipart(f *testing.F) {
	f.Add([]byte(formOf("file@", "RIFF", "model", "whisper", "stream", "true")))
	f.Add([]byte(formOf("model", "", "stream_continuous_usage_stats", "1", "stream", "on")))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := MeterMultipart(boundary, body)
		if err != nil {
			return
		}
		std, err := multipart.NewReader(bytes.NewReader(body), boundary).ReadForm(int64(len(body)) + 1)
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Skip(err) // the standard library has bounds of its own
			}
			return
		}
		if v := std.Value["model"]; len(v) > 1 || len(v) == 1 && v[0] != r.Model || len(v) == 0 && r.HasModel {
			t.Errorf("%q: model %q, want %q", body, r.Model, v)
		}
		changed := edited(&r, body, "up", true)
		again, err := MeterMultipart(boundary, changed)
		if err != nil || again.Model != "up" || r.Stream && !again.WantsUsage || again.FileBytes != r.FileBytes {
			t.Errorf("%q became %q: %+v, %v", body, changed, again, err)
		}
	})
}
