package main_test

import (
	"encoding/json"
	"net/http"
	"os"
	"slices"
	"testing"
)

// TestVLLM runs the client libraries against a real model server and against a node in
// front of it. HEADGATE_TEST_VLLM names the server and HEADGATE_TEST_VLLM_EMBED one that
// embeds; testdata/vllm/with-vllm starts both without a GPU.
func TestVLLM(t *testing.T) {
	direct := target{url: os.Getenv("HEADGATE_TEST_VLLM"), embedURL: os.Getenv("HEADGATE_TEST_VLLM_EMBED"), fold: true}
	if direct.url == "" {
		t.Skip("HEADGATE_TEST_VLLM names no server; make test-vllm starts one")
	}
	direct.model = firstModel(t, direct.url)
	backends := []backend{{"vllm", direct.url, direct.model}}
	if direct.embedURL != "" {
		direct.embedModel = firstModel(t, direct.embedURL)
		backends = append(backends, backend{"embed", direct.embedURL, direct.embedModel})
	}
	exe := buildHeadgate(t)
	for _, s := range scripts() {
		t.Run(s.name, func(t *testing.T) {
			first := s.run(t, direct)
			for _, d := range differences(t, s.name, nil, first, s.run(t, direct)) {
				t.Fatalf("the server itself answers differently the second time: %s", d)
			}
			via := direct
			via.url, via.gateway = startHeadgate(t, exe, policyFor("", backends...)), true
			if via.embedURL != "" {
				via.embedURL = via.url
			}
			compare(t, s.name, append(knownDifferences(), vllmDifferences(direct.model)...), first, s.run(t, via))
		})
	}
}

func vllmDifferences(model string) []knownDifference {
	return []knownDifference{
		{[]string{"models"}, "the node lists the models of both servers", func(v any) any {
			list, ok := dig(v, "result").([]any)
			if !ok {
				list, _ = dig(v, "result", "data").([]any)
			}
			return slices.IndexFunc(list, func(m any) bool { return dig(m, "id") == model }) >= 0
		}},
		// vLLM names itself on the last chunk of a stream, which is the usage chunk where
		// there is one: the node asks for it and keeps it from a client that did not.
		{[]string{"stream.helper", "tools.stream.helper"}, "the hidden usage chunk takes system_fingerprint with it", func(v any) any {
			if r, ok := dig(v, "result").(map[string]any); ok {
				delete(r, "system_fingerprint")
			}
			return v
		}},
	}
}

func firstModel(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(res.Body).Decode(&list); err != nil || len(list.Data) == 0 {
		t.Fatalf("%s lists no model: %v", url, err)
	}
	return list.Data[0].ID
}
