package fakevllm

import (
	"bytes"
	"errors"
	"io"
	"mime/multipart"
	"strconv"
)

// bytesPerSecond is how much sound is taken for a second: 16 kHz mono, 16 bit.
const bytesPerSecond = 32000

// form is what a transcription request holds.
type form struct {
	fields map[string]string
	file   []byte
	found  bool
}

// readForm reads a multipart body, which MaxBody has bounded.
func (c *call) readForm() (f form, e *apiError) {
	parse := *c.r
	parse.Body = io.NopCloser(bytes.NewReader(c.body))
	mr, err := parse.MultipartReader()
	if err != nil {
		return f, badRequest("", "The body must be multipart/form-data: %v", err)
	}
	f.fields = map[string]string{}
	for {
		var p *multipart.Part
		if p, err = mr.NextPart(); errors.Is(err, io.EOF) {
			break
		}
		var b []byte
		if err == nil {
			b, err = io.ReadAll(p)
		}
		if err != nil {
			return f, badRequest("", "The form cannot be read: %v", err)
		}
		if p.FormName() == "file" {
			f.file, f.found = b, true
		} else {
			f.fields[p.FormName()] = string(b)
		}
	}
	if !f.found {
		return f, badRequest("file", "file: field required")
	}
	return f, nil
}

// transcribe serves /v1/audio/transcriptions and translations: a second of sound
// holds two tokens of speech.
func (c *call) transcribe() {
	f, e := c.readForm()
	if e != nil {
		c.refuse(e)
		return
	}
	model, ok := c.model(f.fields["model"])
	if !ok {
		return
	}
	seconds := int64(len(f.file)+bytesPerSecond-1) / bytesPerSecond
	n := min(2*max(seconds, 1), maxOutput)
	stream := f.fields["stream"] == "true"
	p := c.plan(model, c.seed(f.file), caps{n: 1, most: &n, param: "file", prompt: 0}, 1, stream)
	if p == nil {
		return
	}
	p.choices[0].finish = "stop"
	p.includeUsage = f.fields["stream_include_usage"] == "true"
	d := &audioDialect{
		p: p, seconds: seconds, format: f.fields["response_format"],
		head: appendHead([]byte("data: "), "trsc-"+p.id, "transcription.chunk", model),
	}
	if d.format == "text" && !stream {
		d.plain, p.contentType = true, "text/plain; charset=utf-8"
	}
	c.answer(p, d)
}

// audioDialect is a transcription: usage is a duration, and tokens on streams.
type audioDialect struct {
	p       *plan
	head    []byte
	seconds int64
	format  string
	plain   bool
	sent    int64
}

func (d *audioDialect) frame(b []byte, text, finish string) []byte {
	b = append(b, d.head...)
	b = append(b, `{"delta":{"content":`...)
	b = append(appendString(b, text), `},"finish_reason":`...)
	if finish == "" {
		b = append(b, `null`...)
	} else {
		b = append(appendString(b, finish), `,"stop_reason":null`...)
	}
	return append(b, "}]}\n\n"...)
}

func (d *audioDialect) open(b []byte) []byte { return b }

func (d *audioDialect) token(b []byte, k, i int) []byte {
	d.sent++
	return d.frame(b, d.p.token(k, i), "")
}

func (d *audioDialect) close(b []byte) []byte {
	b = d.frame(b, "", d.p.choices[0].finish)
	if d.p.includeUsage && d.p.usage() {
		b = append(b, d.head...)
		b = append(b, `],"usage":`...)
		b = append(d.p.appendUsage(b, d.sent), "}\n\n"...)
	}
	return append(b, doneFrame()...)
}

func (d *audioDialect) body(b []byte) []byte {
	if d.plain {
		return append(b, d.p.text(0)...)
	}
	b = append(b, `{"text":`...)
	b = appendString(b, d.p.text(0))
	if d.format == "verbose_json" {
		b = append(b, `,"language":"en","duration":"`...)
		b = append(strconv.AppendInt(b, d.seconds, 10), `","segments":[],"words":[]`...)
	}
	if d.p.usage() {
		b = append(b, `,"usage":{"type":"duration","seconds":`...)
		b = append(d.p.appendCount(b, d.seconds), '}')
	}
	return append(b, '}')
}
