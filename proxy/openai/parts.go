package openai

// part gathers what a content part or a source says before its object closes: the
// members may come in any order.
type part struct {
	image, audio, video bool // a payload of that sort is there
	typed               byte // 'i', 'a' or 'v' by its type; 0 for text
	sourced             bool // an Anthropic source is there and counts itself
	textSource          bool
	payload             int64 // text bytes of a source that turns out to be text
}

// part reads a member of a content part. Media are billed flat, whether they come as
// data, as an address or as a reference to something cached; their payload is no text.
func (m *meter) part(p *part, name []byte, v int) int {
	var seen *bool
	switch string(name) {
	case "type":
		p.classify(m.body[v:skipValue(m.body, v)])
		return m.label(name, v, inText)
	case "content", "output":
		return m.value(v, inContent)
	case "source":
		if m.body[v] == '{' {
			p.sourced = true
			return m.value(v, inSource)
		}
		return m.value(v, inText)
	case "cache_control":
		return m.value(v, inSkip)
	case "image_url", "image", "input_image", "image_embeds", "image_pil", "file", "file_data", "file_url", "file_id":
		seen = &p.image
	case "input_audio", "audio_url", "audio", "audio_embeds":
		seen = &p.audio
	case "video_url", "video", "input_video", "video_embeds":
		seen = &p.video
	default:
		return m.label(name, v, inSchema)
	}
	if m.body[v] != 'n' {
		*seen = true
	}
	return m.value(v, inSkip)
}

// classify notes the type of a part or source.
func (p *part) classify(typ []byte) {
	switch unquote(typ) {
	case "image_url", "input_image", "image", "image_embeds", "image_pil", "input_file", "file":
		p.typed = 'i'
	case "input_audio", "audio_url", "audio", "audio_embeds":
		p.typed = 'a'
	case "video_url", "video", "input_video", "video_embeds":
		p.typed = 'v'
	case "text", "content":
		p.textSource = true
	}
}

// source reads a member of an Anthropic source: base64, url, file, text or content.
func (m *meter) source(p *part, name []byte, v int) int {
	switch string(name) {
	case "type":
		p.classify(m.body[v:skipValue(m.body, v)])
		return m.label(name, v, inText)
	case "content":
		return m.value(v, inContent)
	case "data", "url", "file_id":
		end := skipValue(m.body, v)
		if raw := m.body[v:end]; isString(raw) {
			p.payload += decodedLen(raw[1 : len(raw)-1])
			return end
		}
		return m.value(v, inText)
	}
	return m.label(name, v, inText)
}

// count adds a closed part or source to the request.
func (p *part) count(r *Request, at place) {
	switch {
	case at == inSource && p.textSource:
		r.InputBytes += p.payload
	case at == inSource:
		r.Images++
	case at == inContent:
		// A type without a payload is a reference to a medium that the server has cached.
		bare := !p.image && !p.audio && !p.video && !p.sourced
		if p.image || bare && p.typed == 'i' {
			r.Images++
		}
		if p.audio || bare && p.typed == 'a' {
			r.Audio++
		}
		if p.video || bare && p.typed == 'v' {
			r.Video++
		}
	}
}
