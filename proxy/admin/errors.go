package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// Code says for programs why a call failed. The words that the ledger answers with
// (conflict, exists, invalid, not_found) are the same here.
type Code string

// The codes.
const (
	Invalid      Code = "invalid"         // 400: the caller's mistake; nothing was done
	Unauthorized Code = "unauthorized"    // 401: no token that the node knows
	Forbidden    Code = "forbidden"       // 403: the token's role is too small
	NotFound     Code = "not_found"       // 404
	Conflict     Code = "conflict"        // 409: something else is in force than was expected; nothing was done
	Exists       Code = "exists"          // 409: the name is taken; nothing was done
	TooLarge     Code = "too_large"       // 413
	Internal     Code = "internal"        // 500
	Unsupported  Code = "unsupported"     // 501: this node has no such function
	Incomplete   Code = "incomplete"      // 503: not every node answered, and all were needed
	NoQuorum     Code = "no_quorum"       // 503: nothing was done; the message says what helps
	Unknown      Code = "unknown_outcome" // 504: it may or may not have been applied
)

// Status is the HTTP status that goes with the code.
func (c Code) Status() int {
	switch c {
	case Invalid:
		return http.StatusBadRequest
	case Unauthorized:
		return http.StatusUnauthorized
	case Forbidden:
		return http.StatusForbidden
	case NotFound:
		return http.StatusNotFound
	case Conflict, Exists:
		return http.StatusConflict
	case TooLarge:
		return http.StatusRequestEntityTooLarge
	case Unsupported:
		return http.StatusNotImplemented
	case NoQuorum, Incomplete:
		return http.StatusServiceUnavailable
	case Unknown:
		return http.StatusGatewayTimeout
	}
	return http.StatusInternalServerError
}

// Error is a failure with its code. What the functions of Config return without one
// counts as Internal.
type Error struct {
	Code Code
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Errorf makes an Error as fmt.Errorf does.
func Errorf(code Code, format string, args ...any) error {
	return &Error{code, fmt.Errorf(format, args...)}
}

// coded gives err the code, unless it has one.
func coded(code Code, err error) error {
	var e *Error
	if err == nil || errors.As(err, &e) {
		return err
	}
	return &Error{code, err}
}

// fail answers with an error.
func fail(w http.ResponseWriter, err error) {
	code := Internal
	var e *Error
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		code = TooLarge
	case errors.As(err, &e):
		code = e.Code
	}
	writeJSON(w, code.Status(), map[string]any{"error": map[string]any{"message": err.Error(), "code": code}})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		status, raw = http.StatusInternalServerError, []byte(`{"error": {"message": "the answer can't be written as JSON", "code": "internal"}}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(raw, '\n')) // the client may be gone
}
