package embed

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// StatusError is an answer of another status than 200.
type StatusError struct{ Code int }

func (e *StatusError) Error() string { return fmt.Sprintf("status %d", e.Code) }

// Status is the code.
func (e *StatusError) Status() int { return e.Code }

// HTTPPost gives a Post for EndpointConfig that sends to {base}/embeddings, where base is the
// address as clients of OpenAI's API have it: http://host:port/v1. It adds /v1 where base has no
// path. key goes into Authorization; "": none does. Nothing is retried, redirects are refused.
func HTTPPost(client *http.Client, base, key string) (func(ctx context.Context, body []byte) ([]byte, error), error) {
	address, err := url.Parse(strings.TrimRight(base, "/"))
	if err != nil {
		return nil, fmt.Errorf("embed endpoint: url: %w", err)
	}
	if address.Scheme != "http" && address.Scheme != "https" || address.Host == "" {
		return nil, fmt.Errorf("embed endpoint: url %q: want http://host:port/v1", base)
	}
	if address.Path == "" {
		address.Path = "/v1"
	}
	target := address.JoinPath("embeddings").String()
	own := *client
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return func(ctx context.Context, body []byte) ([]byte, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, target, bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		request.Header.Set("Content-Type", "application/json")
		if key != "" {
			request.Header.Set("Authorization", "Bearer "+key)
		}
		response, err := own.Do(request)
		if err != nil {
			return nil, err
		}
		defer func() { _ = response.Body.Close() }()
		if response.StatusCode != http.StatusOK {
			_, _ = io.CopyN(io.Discard, response.Body, 4096) // so that the connection can be used again
			return nil, &StatusError{Code: response.StatusCode}
		}
		// One byte more than an answer may have: the endpoint refuses those.
		return io.ReadAll(io.LimitReader(response.Body, maxAnswer+1))
	}, nil
}
