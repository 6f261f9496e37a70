package upstream

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

const (
	maxKeyFile       = 4 << 10 // bytes
	anthropicVersion = "2023-06-01"
)

// readKey gives a backend's key: its own, or what its file holds now.
func readKey(b Backend) (*string, error) {
	if b.APIKeyFile == "" {
		return &b.APIKey, nil
	}
	f, err := os.Open(b.APIKeyFile)
	if err != nil {
		return nil, fmt.Errorf("api_key_file: %w", err)
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return nil, fmt.Errorf("api_key_file: %w", err)
	}
	key := strings.TrimSpace(string(data))
	switch {
	case len(data) > maxKeyFile:
		return nil, fmt.Errorf("api_key_file: %s is longer than %d bytes; it is to hold the key alone", b.APIKeyFile, maxKeyFile)
	case key == "":
		return nil, fmt.Errorf("api_key_file: %s is empty; write the key into it", b.APIKeyFile)
	case strings.ContainsAny(key, "\r\n\x00"):
		return nil, fmt.Errorf("api_key_file: %s holds several lines; it is to hold the key alone", b.APIKeyFile)
	}
	return &key, nil
}

// setAuth puts the backend's key in place of whatever credentials the request carries.
func setAuth(h http.Header, k Kind, key string) {
	h.Del("Authorization")
	h.Del("X-Api-Key")
	switch {
	case k == Anthropic:
		if h.Get("Anthropic-Version") == "" {
			h.Set("Anthropic-Version", anthropicVersion)
		}
		if key != "" {
			h.Set("X-Api-Key", key)
		}
	case key != "":
		h.Set("Authorization", "Bearer "+key)
	}
}
