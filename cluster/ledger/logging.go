package ledger

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

const (
	// logRepeat is how long the same event of a library at warn or above stays quiet after
	// it was logged: an unreachable peer is worth a line, not ten a second.
	logRepeat = 10 * time.Second
	// maxLogEvents bounds the events that logRepeat remembers.
	maxLogEvents = 256
)

// hclogAdapter lets raft, raft-wal and autopilot log to slog: one constant message, the
// library's own words under "event", its keys in snake case. It is safe for concurrent use.
type hclogAdapter struct {
	to      *slog.Logger
	name    string
	implied []any
	seen    *seenEvents // shared by all that came from one newHclog
}

// seenEvents holds when each event was logged last.
type seenEvents struct {
	mu sync.Mutex
	at map[string]time.Time
}

func newHclog(to *slog.Logger, name string) hclog.Logger {
	return &hclogAdapter{to: to, name: name, seen: &seenEvents{at: map[string]time.Time{}}}
}

// RaftLogger is the logger of raft's own parts, for a transport.
func RaftLogger(to *slog.Logger) hclog.Logger { return newHclog(to, "raft") }

// quiet tells whether the event was logged within logRepeat, and notes it if not.
func (s *seenEvents) quiet(event string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, ok := s.at[event]; ok && now.Sub(at) < logRepeat {
		return true
	}
	if len(s.at) >= maxLogEvents {
		clear(s.at)
	}
	s.at[event] = now
	return false
}

func slogLevel(level hclog.Level) slog.Level {
	switch level {
	case hclog.Error:
		return slog.LevelError
	case hclog.Warn:
		return slog.LevelWarn
	case hclog.Info:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}

// Log hands one event on.
func (a *hclogAdapter) Log(level hclog.Level, msg string, args ...any) {
	at := slogLevel(level)
	if level == hclog.Trace || !a.to.Enabled(context.Background(), at) {
		return
	}
	if at >= slog.LevelWarn && a.seen.quiet(msg, time.Now()) {
		return
	}
	attrs := []slog.Attr{slog.String("component", a.name), slog.String("event", strings.TrimSpace(msg))}
	attrs = append(attrs, attributes(a.implied)...)
	attrs = append(attrs, attributes(args)...)
	a.to.LogAttrs(context.Background(), at, "ledger library", attrs...)
}

func attributes(args []any) (attrs []slog.Attr) {
	for i := 0; i+1 < len(args); i += 2 {
		key, ok := args[i].(string)
		if !ok {
			key = fmt.Sprint(args[i])
		}
		key = strings.NewReplacer("-", "_", " ", "_").Replace(key)
		switch v := args[i+1].(type) {
		case hclog.Format:
			if len(v) > 0 {
				attrs = append(attrs, slog.String(key, fmt.Sprintf(fmt.Sprint(v[0]), v[1:]...)))
			}
		case fmt.Stringer:
			attrs = append(attrs, slog.String(key, v.String()))
		case error:
			attrs = append(attrs, slog.String(key, v.Error()))
		default:
			attrs = append(attrs, slog.Any(key, v))
		}
	}
	return attrs
}

func (a *hclogAdapter) Trace(string, ...any)             {}
func (a *hclogAdapter) Debug(msg string, args ...any)    { a.Log(hclog.Debug, msg, args...) }
func (a *hclogAdapter) Info(msg string, args ...any)     { a.Log(hclog.Info, msg, args...) }
func (a *hclogAdapter) Warn(msg string, args ...any)     { a.Log(hclog.Warn, msg, args...) }
func (a *hclogAdapter) Error(msg string, args ...any)    { a.Log(hclog.Error, msg, args...) }
func (a *hclogAdapter) IsTrace() bool                    { return false }
func (a *hclogAdapter) IsDebug() bool                    { return a.enabled(slog.LevelDebug) }
func (a *hclogAdapter) IsInfo() bool                     { return a.enabled(slog.LevelInfo) }
func (a *hclogAdapter) IsWarn() bool                     { return a.enabled(slog.LevelWarn) }
func (a *hclogAdapter) IsError() bool                    { return a.enabled(slog.LevelError) }
func (a *hclogAdapter) ImpliedArgs() []any               { return a.implied }
func (a *hclogAdapter) Name() string                     { return a.name }
func (a *hclogAdapter) SetLevel(hclog.Level)             {}
func (a *hclogAdapter) ResetNamed(n string) hclog.Logger { return a.renamed(n) }
func (a *hclogAdapter) Named(n string) hclog.Logger      { return a.renamed(a.name + "." + n) }

func (a *hclogAdapter) enabled(level slog.Level) bool {
	return a.to.Enabled(context.Background(), level)
}

// GetLevel is the lowest level that slog would keep.
func (a *hclogAdapter) GetLevel() hclog.Level {
	switch {
	case a.IsDebug():
		return hclog.Debug
	case a.IsInfo():
		return hclog.Info
	case a.IsWarn():
		return hclog.Warn
	default:
		return hclog.Error
	}
}

func (a *hclogAdapter) With(args ...any) hclog.Logger {
	b := *a
	b.implied = append(append([]any(nil), a.implied...), args...)
	return &b
}

func (a *hclogAdapter) renamed(name string) hclog.Logger {
	b := *a
	b.name = name
	return &b
}

func (a *hclogAdapter) StandardLogger(*hclog.StandardLoggerOptions) *log.Logger {
	return log.New(a.StandardWriter(nil), "", 0)
}

func (a *hclogAdapter) StandardWriter(*hclog.StandardLoggerOptions) io.Writer { return lineWriter{a} }

// lineWriter logs what a library writes, a line at a time.
type lineWriter struct{ to *hclogAdapter }

func (w lineWriter) Write(p []byte) (int, error) {
	for line := range bytes.Lines(p) {
		w.to.Info(string(bytes.TrimSpace(line)))
	}
	return len(p), nil
}
