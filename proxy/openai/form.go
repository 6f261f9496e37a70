package openai

import (
	"bytes"
	"fmt"
	"mime"
	"strings"
)

// Bounds of a multipart form.
const (
	maxFields      = 128
	maxFieldHeader = 8 << 10
	maxBoundary    = 70 // RFC 2046, section 5.1.1
)

// MeterMultipart reads the multipart/form-data body of an audio route. It is stricter
// than RFC 7578: no preamble, one plain Content-Disposition a part, no transfer
// encodings, no field of ours twice; whatever a second parser could read differently is
// an *InputError. boundary is the parameter of the Content-Type.
func MeterMultipart(boundary string, body []byte) (Request, error) {
	f := form{body: body, delimiter: "--" + boundary, seen: map[string]bool{}, req: Request{MaxOutput: -1, Sequences: 1, Inputs: 1}}
	f.req.spans = spans{form: true, kind: Audio}
	if boundary == "" || len(boundary) > maxBoundary || strings.ContainsAny(boundary, "\r\n") {
		return Request{}, &InputError{Problem: "the Content-Type has no usable boundary"}
	}
	if !bytes.HasPrefix(body, []byte(f.delimiter+"\r\n")) {
		return Request{}, &InputError{Problem: "the form does not open with the boundary of its Content-Type"}
	}
	i := len(f.delimiter) + 2
	for fields := 0; ; fields++ {
		if fields == maxFields {
			return Request{}, &InputError{Offset: int64(i), Problem: fmt.Sprintf("more than %d fields", maxFields)}
		}
		next, last, err := f.part(i)
		if err != nil {
			return Request{}, err
		}
		if last {
			break
		}
		i = next
	}
	f.req.Sequences, f.req.Sampling.N = max(f.n, 1), max(f.n, 1)
	f.req.Bounds.Text = int64(len(body)) - f.req.FileBytes
	return f.req, nil
}

type form struct {
	body      []byte
	delimiter string
	req       Request
	seen      map[string]bool // interpreted fields
	n         int64
}

// interpretedField tells whether the meter knows what a field means; such a field may
// occur once.
func interpretedField(name string) bool {
	switch name {
	case "model", "stream", "stream_include_usage", "stream_continuous_usage_stats",
		"max_tokens", "max_completion_tokens", "n", "user", "prompt":
		return true
	}
	return false
}

// part reads the part whose headers start at i.
func (f *form) part(i int) (next int, last bool, err error) {
	head := bytes.Index(f.body[i:min(len(f.body), i+maxFieldHeader)], []byte("\r\n\r\n"))
	if head < 0 {
		return 0, false, &InputError{Offset: int64(i), Problem: "a form field has no end of its headers, or too long ones"}
	}
	name, file, problem := disposition(string(f.body[i : i+head]))
	if problem != "" {
		return 0, false, &InputError{Offset: int64(i), Problem: problem}
	}
	start := i + head + 4
	size := bytes.Index(f.body[start:], []byte("\r\n"+f.delimiter))
	if size < 0 || bytes.HasPrefix(f.body[start:], []byte(f.delimiter)) {
		const problem = "the field does not end with the boundary on a line of its own"
		return 0, false, &InputError{Offset: int64(start), Field: clip([]byte(name)), Problem: problem}
	}
	end := start + size
	next = end + 2 + len(f.delimiter)
	switch {
	case bytes.HasPrefix(f.body[next:], []byte("\r\n")):
		next += 2
	case bytes.HasPrefix(f.body[next:], []byte("--")):
		last = true
		if rest := f.body[next+2:]; len(rest) > 0 && string(rest) != "\r\n" {
			return 0, false, &InputError{Offset: int64(next + 2), Problem: "bytes follow the form; remove them"}
		}
	default:
		return 0, false, &InputError{Offset: int64(next), Problem: "the boundary occurs inside a field"}
	}
	if file && interpretedField(name) {
		return 0, false, &InputError{Offset: int64(start), Field: name, Problem: "is sent as a file; send it as a plain field"}
	}
	if file {
		f.req.Audio++
		f.req.FileBytes += int64(end - start)
		return next, last, nil
	}
	return next, last, f.field(name, span{start, end})
}

// disposition reads the headers of a part.
func disposition(headers string) (name string, file bool, problem string) {
	found := false
	for line := range strings.SplitSeq(headers, "\r\n") {
		key, value, ok := strings.Cut(line, ":")
		if !ok || strings.ContainsAny(key, " \t\r\n") || strings.ContainsAny(value, "\r\n") {
			return "", false, "a form field has a malformed header"
		}
		switch strings.ToLower(key) {
		case "content-transfer-encoding":
			return "", false, "a form field has a Content-Transfer-Encoding; send it as it is"
		case "content-disposition":
			if found {
				return "", false, "a form field has two Content-Dispositions"
			}
			found = true
			kind, params, err := mime.ParseMediaType(value)
			name = params["name"]
			plain := strings.HasPrefix(strings.TrimLeft(value, " "), `form-data; name="`+name+`"`)
			if err != nil || kind != "form-data" || name == "" || !plain || strings.ContainsAny(name, `"\\`) || strings.Contains(value, " name*") {
				return "", false, `a form field's Content-Disposition must read: form-data; name="…"`
			}
			_, file = params["filename"]
		}
	}
	if !found {
		return "", false, "a form field has no Content-Disposition"
	}
	return name, file, ""
}

// field reads a field that is no file.
func (f *form) field(name string, at span) (err error) {
	value := string(f.body[at.start:at.end])
	bad := func(problem string) error {
		return &InputError{Offset: int64(at.start), Field: clip([]byte(name)), Problem: problem}
	}
	if interpretedField(name) {
		if f.seen[name] {
			return bad("the field occurs twice; send it once")
		}
		f.seen[name] = true
	}
	r, problem := &f.req, ""
	switch name {
	case "model", "user":
		if len(value) > maxIdentity {
			return bad(fmt.Sprintf("must be at most %d bytes long", maxIdentity))
		}
		if name == "user" {
			r.User = value
			break
		}
		r.Model, r.HasModel, r.spans.model = value, value != "", at
	case "stream":
		r.spans.stream = at
		r.Stream, problem = formFlag(value)
	case "stream_include_usage":
		r.spans.usage = at
		r.WantsUsage, problem = formFlag(value)
	case "stream_continuous_usage_stats":
		r.spans.continuous = at
		r.Continuous, problem = formFlag(value)
	case "max_tokens", "max_completion_tokens":
		most := int64(-1)
		problem = formNumber(value, &most, maxExact)
		r.spans.cap(at, most)
		r.MaxOutput = max(r.MaxOutput, most)
	case "n":
		problem = formNumber(value, &f.n, maxSequences)
	default:
		if name == "prompt" || len(value) > maxLabel {
			r.InputBytes += int64(len(value))
		}
	}
	if problem != "" {
		return bad(problem)
	}
	return nil
}

// formFlag reads the spellings that vLLM's form parser takes for a truth value.
func formFlag(s string) (v bool, problem string) {
	switch strings.ToLower(s) {
	case "true", "1", "yes", "y", "on", "t":
		return true, ""
	case "false", "0", "no", "n", "off", "f", "":
		return false, ""
	}
	return false, "must be true or false"
}

// formNumber raises into to the number s.
func formNumber(s string, into *int64, limit int64) (problem string) {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return "must be a whole number in digits"
		}
	}
	if s == "" {
		return ""
	}
	x, problem := integer([]byte(s))
	if problem == "" && x > limit {
		problem = fmt.Sprintf("must be at most %d", limit)
	}
	if problem == "" {
		*into = max(*into, x)
	}
	return problem
}
