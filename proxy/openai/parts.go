package openai

import "cmp"

// part gathers what a content part or a source says before its object closes: the
// members may come in any order.
type part struct {
	image, audio, video bool // a payload of that sort is there
	typed               byte // 'i', 'a' or 'v' by its type; 0 for text
	sourced             bool // an Anthropic source is there and counts itself
	textSource          bool
	id, said            bool   // of an item: it has an id; it says what it is
	beyond              string // its type, if that is of a medium without a known size
	payload, raw        int64  // bytes of a source that turns out to be text, decoded and as written
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
	case "uuid":
		if m.body[v] != 'n' { // of what the server may have cached under it
			m.depends("uuid")
		}
		return m.label(name, v, inSchema)
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
	switch string(name) {
	case "image_url", "image", "input_image", "image_pil", "input_audio", "audio_url", "audio":
	default: // as many pages, pictures or rows as it has
		m.req.Bounds.Beyond = string(name)
	}
	end := m.value(v, inSkip)
	m.medium(name, m.body[v:end])
	m.media += int64(end - v)
	return end
}

// item reads what a message or an item says of itself.
func (m *meter) item(p *part, name []byte, v int) {
	switch string(name) {
	case "type":
		p.said = p.said || m.body[v] != 'n'
		if m.kind == Response && unquote(m.body[v:skipValue(m.body, v)]) == "item_reference" {
			m.req.Bounds.Beyond = "item_reference"
			m.depends("item_reference")
		}
	case "role", "content":
		p.said = true
	case "id":
		p.id = m.body[v] != 'n'
	case "audio": // an earlier answer's, by its id
		if m.body[v] != 'n' {
			m.depends("audio")
		}
	}
}

// classify notes the type of a part or source.
func (p *part) classify(typ []byte) {
	switch name := unquote(typ); name {
	case "image_url", "input_image", "image", "image_pil":
		p.typed = 'i'
	case "image_embeds", "input_file", "file":
		p.typed, p.beyond = 'i', name
	case "document":
		p.beyond = name
	case "audio_embeds":
		p.typed, p.beyond = 'a', name
	case "input_audio", "audio_url", "audio":
		p.typed = 'a'
	case "video_url", "video", "input_video", "video_embeds":
		p.typed, p.beyond = 'v', name
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
			if string(name) != "data" && !isData(raw) {
				m.depends(clip(name))
			}
			p.payload += decodedLen(raw[1 : len(raw)-1])
			p.raw += int64(len(raw))
			return end
		}
		return m.value(v, inText)
	}
	return m.label(name, v, inText)
}

// count adds a closed part or source to the request.
func (p *part) count(m *meter, at place) {
	r := &m.req
	if p.beyond != "" {
		r.Bounds.Beyond = p.beyond
	}
	switch {
	case at == inMessage && m.kind == Response && p.id && !p.said: // the type may be left out
		r.Bounds.Beyond = cmp.Or(r.Bounds.Beyond, "item_reference")
		m.depends("item_reference")
	case at == inSource && p.textSource:
		r.InputBytes += p.payload
	case at == inSource:
		r.Images++
		m.media += p.raw
	case at == inContent:
		// A type without a payload is a reference to a medium that the server has cached.
		bare := !p.image && !p.audio && !p.video && !p.sourced
		if bare && p.typed != 0 {
			m.depends("uuid")
		}
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
