package cluster

import (
	"bytes"
	"log"
	"strings"
	"time"
)

const (
	sayEvery = time.Minute // one line of a kind
	maxSaid  = 256         // kinds remembered
)

// say has a line logged by the Gossip's own goroutine, at most once per key and minute. It
// never waits: beyond maxNotices lines are dropped.
func (g *Gossip) say(key string, line func()) {
	if !g.said.due(key) {
		return
	}
	select {
	case g.notices <- line:
	default:
	}
}

// tell writes the log lines, so that nobody else waits for them.
func (g *Gossip) tell() {
	for {
		select {
		case <-g.ctx.Done():
			return
		case line := <-g.notices:
			line()
		}
	}
}

func newMemberlistLog(g *Gossip) *log.Logger { return log.New(memberlistLog{g}, "", 0) }

// memberlistLog turns memberlist's lines into few and clear ones: what tells of a wrong
// key or a foreign cluster gets its remedy, all else is for debugging.
type memberlistLog struct{ g *Gossip }

func (w memberlistLog) Write(p []byte) (int, error) {
	text := string(bytes.TrimSpace(p))
	from := text[strings.LastIndex(text, " ")+1:]
	g := w.g
	switch {
	case strings.Contains(text, "unacceptable label"):
		g.say("label "+hostOf(from), func() {
			g.log.Warn("gossip of another cluster was refused", "detail", text, "remedy", "check --join and --cluster-name on both sides")
		})
	case wrongKey(text):
		g.say("key "+hostOf(from), func() {
			g.log.Warn("gossip that the keys of this node do not open was refused", "detail", text,
				"remedy", "copy the same gossip.keys to all nodes; while keys are rotated, the new one must be known everywhere before it becomes the first")
		})
	case strings.HasPrefix(text, "[ERR]"), strings.HasPrefix(text, "[WARN]"):
		// The kind is what stands before the first particular.
		kind, _, _ := strings.Cut(strings.TrimPrefix(text, "[ERR] memberlist: "), ":")
		g.say("memberlist "+kind[:min(len(kind), 40)], func() { g.log.Debug("memberlist", "detail", text) })
	}
	return len(p), nil
}

func hostOf(from string) string {
	host, _, _ := strings.Cut(strings.TrimPrefix(from, "from="), ":")
	return host
}

// wrongKey tells from an error's or a log line's text that the two sides' gossip keys differ.
func wrongKey(text string) bool {
	for _, part := range []string{"no installed keys could decrypt", "Decrypt packet failed", "encryption is configured but remote state is not encrypted", "remote state is encrypted and encryption is not configured"} {
		if strings.Contains(text, part) {
			return true
		}
	}
	return false
}
