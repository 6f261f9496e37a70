package openai

import "bytes"

// Answers depend on more than the body where it names what the server keeps, or what the server
// looks up. [Request.Outside] has the name of such a field; the same body may get another answer
// tomorrow, and it was written for whoever may see what is named. They are
//
//   - states: previous_response_id, conversation, a response's prompt by its id, item_reference
//     (that is also an item of nothing but an id), the audio of an earlier answer, session and
//     thread ids, containers, blocks of a KV cache that another server holds (kv_transfer_params);
//   - files and media by id or by address, or by a uuid under which vLLM has cached them;
//   - searches and other tools that the server runs: tools of other types than function and
//     custom, web_search_options, mcp_servers, plugins and their like;
//   - the clock, where a chat_template asks for it.
//
// A medium is in the body where it is base64 or a data: address. What only has to be kept does
// not make an answer depend on anything: see Store and Background.

// depends notes that the answer depends on what is not in the body.
func (m *meter) depends(field string) {
	if m.req.Outside == "" {
		m.req.Outside = field
	}
}

// looksUp notes the members of the top level by which an answer depends on what is not in the body.
func (m *meter) looksUp(name []byte, v int) {
	if m.body[v] == 'n' {
		return
	}
	known := name
	if !isPlain(name) { // some servers take other case for the same
		known = bytes.ToLower(bytes.ToUpper(name))
	}
	switch string(known) {
	case "prompt":
		if m.body[v] == '{' && m.kind == Response {
			m.depends("prompt")
		}
	case "tools":
		if m.req.Bounds.Rounds == "tools" || string(known) != string(name) {
			m.depends("tools")
		}
	case "chat_template":
		if bytes.Contains(m.body[v:skipValue(m.body, v)], []byte("strftime_now")) {
			m.depends("chat_template")
		}
	case "previous_response_id", "conversation", "previous_interaction_id", "thread_id", "session_id", "session_params",
		"container", "file_ids", "vector_store_ids", "data_sources", "kv_transfer_params",
		"web_search_options", "search_parameters", "search_settings", "mcp_servers", "plugins", "connectors":
		m.depends(string(known))
	}
}

// medium notes the member of a content part that holds a medium's payload, or says where it is.
func (m *meter) medium(name, raw []byte) {
	switch string(name) {
	case "image_embeds", "audio_embeds", "video_embeds", "image_pil", "file_data":
		return
	}
	if !isNull(raw) && !isInline(raw) {
		m.depends(clip(name))
	}
}

// isInline tells whether a medium's value is the payload itself: a data: address, or an object
// that has one, or base64, and names nothing else.
func isInline(raw []byte) bool {
	if raw[0] != '{' {
		return isData(raw)
	}
	payload := false
	for o := (object{b: raw}); o.next(); {
		switch string(o.name) {
		case "url", "file_url":
			if !isNull(o.value) && !isData(o.value) {
				return false
			}
			payload = payload || isString(o.value)
		case "data", "file_data":
			payload = payload || isString(o.value)
		case "detail", "format", "filename", "media_type", "mime_type", "type":
		default:
			if isString(o.value) { // an id, by whatever name
				return false
			}
		}
	}
	return payload
}

// isData tells whether a value is a data: address.
func isData(v []byte) bool {
	const scheme = `"data:`
	return len(v) > len(scheme) && bytes.EqualFold(v[:len(scheme)], []byte(scheme))
}
