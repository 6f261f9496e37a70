package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headgate/cluster/ledger"
	"headgate/limiter"
)

// hooked is a webhook and the ledger behind a notifier.
type hooked struct {
	mu      sync.Mutex
	untold  []notice
	got     []notice
	headers []http.Header
	answer  func(n notice) (status int, err error) // of the webhook
	tell    error                                  // of the ledger
	leads   bool
	log     bytes.Buffer
}

// RoundTrip is the webhook's side.
func (h *hooked) RoundTrip(r *http.Request) (*http.Response, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var n notice
	if err := json.NewDecoder(r.Body).Decode(&n); err != nil {
		return nil, err
	}
	h.got, h.headers = append(h.got, n), append(h.headers, r.Header)
	status, err := h.answer(n)
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: status, Status: http.StatusText(status), Body: io.NopCloser(strings.NewReader("thanks")), Header: http.Header{}}, nil
}

func (h *hooked) notifier() *notifier {
	return &notifier{
		leads: func() bool { h.mu.Lock(); defer h.mu.Unlock(); return h.leads },
		hook: func() (webhook, bool) {
			return webhook{"https://chat.example/hooks/T0/secret-path", "hook-token"}, true
		},
		pending: func(most int) []notice {
			h.mu.Lock()
			defer h.mu.Unlock()
			return slices.Clone(h.untold[:min(most, len(h.untold))])
		},
		told: func(_ context.Context, n notice) error {
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.tell != nil {
				return h.tell
			}
			h.untold = slices.DeleteFunc(h.untold, func(u notice) bool { return u.ID == n.ID })
			return nil
		},
		client: &http.Client{Transport: h, Timeout: notifyTime}, log: slog.New(slog.NewTextHandler(&h.log, nil)),
	}
}

func (h *hooked) posts() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.got)
}

// TestWebhook: each notice goes out until it was taken and the ledger knows, and then not again;
// one that is refused does not keep the others, and what can't be reached is not hammered.
func TestWebhook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("connection refused")
		fail := true
		h := &hooked{leads: true, untold: []notice{{ID: "a", Event: "budget.alert", Budget: "m"}, {ID: "b"}, {ID: "old", stale: true}}}
		h.answer = func(n notice) (int, error) {
			switch {
			case fail:
				return 0, broken
			case n.ID == "a":
				return 503, nil
			}
			return 204, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { h.notifier().run(ctx) })

		time.Sleep(time.Hour) // of the bubble's
		synctest.Wait()
		// 1 s, then 2, 4, … 256 s, then each 300 s
		if n := h.posts(); n < 15 || n > 25 {
			t.Errorf("a webhook out of reach was asked %d times in an hour", n)
		}
		h.mu.Lock()
		fail = false
		h.mu.Unlock()
		time.Sleep(notifyRest)
		synctest.Wait()
		h.mu.Lock()
		if len(h.untold) != 1 || h.untold[0].ID != "a" {
			t.Errorf("still untold: %+v", h.untold)
		}
		if got := h.headers[len(h.headers)-1]; got.Get("Authorization") != "Bearer hook-token" || got.Get("Idempotency-Key") == "" || got.Get("Content-Type") != "application/json" {
			t.Errorf("%v", got)
		}
		h.answer = func(notice) (int, error) { return 200, nil }
		h.tell = ledger.ErrNoLeader
		h.mu.Unlock()
		time.Sleep(2 * notifyRest)
		synctest.Wait()
		h.mu.Lock()
		h.tell = nil
		h.mu.Unlock()
		time.Sleep(2 * notifyRest)
		synctest.Wait()
		n := h.posts()
		h.mu.Lock()
		if len(h.untold) != 0 {
			t.Errorf("still untold: %+v", h.untold)
		}
		for _, got := range h.got {
			if got.ID == "old" {
				t.Error("people were told of a budget long over")
			}
		}
		h.untold, h.leads = []notice{{ID: "c"}}, false
		h.mu.Unlock()
		time.Sleep(time.Hour)
		synctest.Wait()
		if h.posts() != n {
			t.Error("a node that does not lead told somebody")
		}
		cancel()
		wg.Wait()
		text := h.log.String()
		if !strings.Contains(text, "connection refused") || strings.Contains(text, "secret-path") || strings.Contains(text, "hook-token") {
			t.Errorf("the log has a secret, or not what went wrong:\n%s", text)
		}
		if strings.Count(text, "connection refused") != 1 {
			t.Errorf("it says the same again and again:\n%s", text)
		}
	})
}

func TestNotices(t *testing.T) {
	day := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	a := ledger.BudgetAccount{
		Key:   ledger.BudgetKey{Key: limiter.Key{Tenant: "acme", Limit: "month", Subject: "k\x1fm"}, Start: day.UnixNano(), End: day.AddDate(0, 1, 0).UnixNano()},
		Terms: ledger.BudgetTerms{Amount: 250e9, Name: "month", Spike: ledger.Spike{Kill: true}}, Time: day.Add(time.Hour), Spent: 2005e8, Crossed: 80, CrossedAt: day.Add(time.Hour), Notified: 50, Spiked: day.Add(time.Minute),
	}
	list := noticesOf(&a, day)
	if len(list) != 2 || list[0].Event != "budget.alert" || list[1].Event != "budget.spike" || list[0].ID == list[1].ID || list[0].stale {
		t.Fatalf("%+v", list)
	}
	raw, err := json.Marshal(list[0])
	want := `{"id":"` + list[0].ID + `","event":"budget.alert","text":"budget \"month\" of tenant \"acme\" for \"k / m\" has passed 80 %: $200.50 of $250.00 are spent","cluster":"","node":"",` +
		`"time":"2026-06-01T01:00:00Z","tenant":"acme","budget":"month","subject":["k","m"],"period_start":"2026-06-01T00:00:00Z","period_end":"2026-07-01T00:00:00Z","alert_percent":80,"amount_usd":"250.00","spent_usd":"200.50"}`
	if err != nil || string(raw) != want {
		t.Errorf("%s\n%v", raw, err)
	}
	if !strings.Contains(list[1].Text, "killed") || !list[1].spike.Equal(a.Spiked) || list[1].Percent != 0 {
		t.Errorf("%+v", list[1])
	}
	a.Spent, a.Time = 210e9, a.Time.Add(26*time.Hour)
	if again := noticesOf(&a, day); again[0].ID != list[0].ID || again[1].ID != list[1].ID {
		t.Error("another try has another ID")
	}
	passed := a
	passed.CrossedAt = a.CrossedAt.Add(time.Nanosecond)
	if anew := noticesOf(&passed, day); anew[0].ID == list[0].ID || anew[1].ID != list[1].ID {
		t.Error("what is passed anew has the ID of before")
	}
	if late := noticesOf(&a, day.AddDate(0, 1, 2)); !late[0].stale {
		t.Error("a budget long over is told of")
	}
	passed.Key.Start, passed.Key.End = 0, 0
	for days, stale := range map[int]bool{6: false, 8: true} {
		if late := noticesOf(&passed, day.AddDate(0, 0, days)); late[0].stale != stale || late[1].stale != stale {
			t.Errorf("what happened %d days ago: %+v", days, late)
		}
	}
	a.Notified, a.SpikeTold = 80, a.Spiked
	if list := noticesOf(&a, day); len(list) != 0 {
		t.Errorf("told again: %+v", list)
	}
}

// TestNotifyClient follows no redirect: the token is for one host.
func TestNotifyClient(t *testing.T) {
	elsewhere := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/elsewhere" {
			elsewhere++
		}
		http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
	}))
	defer s.Close()
	n := &notifier{client: newNotifyClient(), log: slog.New(slog.DiscardHandler)}
	defer n.client.CloseIdleConnections()
	answered, err := n.post(t.Context(), webhook{s.URL, "t"}, &notice{})
	if !answered || err == nil || !strings.Contains(err.Error(), "307") || elsewhere != 0 {
		t.Errorf("answered %v, %d elsewhere: %v", answered, elsewhere, err)
	}
	if _, err := n.post(t.Context(), webhook{"http://[secret", ""}, &notice{}); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v", err)
	}
}
