//go:build linux

package main_test

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"headgate/proxy/admin"
)

// What the till's model costs, in nano-dollars a token.
const (
	inputPrice  = 1_000
	outputPrice = 10_000
	dollar      = 1_000_000_000
)

// till is a model server that knows what every answer of it costs.
type till struct {
	url   string
	slow  atomic.Int64 // ns that an answer takes
	mu    sync.Mutex
	sales []sale
}

// sale is an answer: whose, under what request id, for how much. It is one from its beginning on, whether its
// client stays or not.
type sale struct {
	tenant, id string
	cost       int64
}

func newTill(t *testing.T, address string) *till {
	t.Helper()
	u := &till{}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(u)
	_ = s.Listener.Close() // its own
	s.Listener = l
	s.Start()
	t.Cleanup(s.Close)
	u.url = s.URL
	return u
}

func (u *till) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Messages []struct{ Content string }
		Max      int64 `json:"max_tokens"`
		Whole    int64 `json:"max_completion_tokens"`
		Tenant   string
	}
	w.Header().Set("Content-Type", "application/json")
	if r.Method != http.MethodPost || json.NewDecoder(r.Body).Decode(&in) != nil {
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		return
	}
	size := int64(8)
	for _, m := range in.Messages {
		size += int64(len(m.Content) / 3)
	}
	most := in.Max
	if in.Whole > 0 {
		most = in.Whole
	}
	out := max(most-rand.Int64N(max(most/4, 1)), 1)
	u.mu.Lock()
	u.sales = append(u.sales, sale{in.Tenant, r.Header.Get("X-Request-Id"), size*inputPrice + out*outputPrice})
	u.mu.Unlock()
	<-time.After(time.Duration(u.slow.Load())) // a model takes its time
	_, _ = fmt.Fprintf(w, `{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}],`+
		`"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}`, size, out, size+out)
}

// of a tenant, by request id, and their sum.
func (u *till) of(tenant string) (costs map[string]int64, sum int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	costs = map[string]int64{}
	for _, s := range u.sales {
		if s.tenant == tenant {
			costs[s.id] += s.cost
			sum += s.cost
		}
	}
	return costs, sum
}

// shop is a cluster before a till, with tenants that each have a key and a budget.
type shop struct {
	*group
	till *till
	keys map[string]string
}

// newShop starts n nodes. budgets are by tenant, as a policy has them; "": none. place may be nil.
func newShop(t *testing.T, n int, u *till, budgets map[string]string, place func(int) (string, string, []string)) *shop {
	t.Helper()
	var plans, tenants strings.Builder
	for _, name := range slices.Sorted(maps.Keys(budgets)) {
		fmt.Fprintf(&plans, "  - {name: %s, budgets: [%s]}\n", name, budgets[name])
		fmt.Fprintf(&tenants, "  - {name: %s, plan: %s}\n", name, name)
	}
	policy := fmt.Sprintf("version: 1\nbackends: [{name: b, url: %q}]\nmodels: [{name: m, backends: [b], context: 100000, price_per_million: {input: \"1.00\", output: \"10.00\"}}]\nplans:\n%stenants:\n%s", u.url, plans.String(), tenants.String())
	if place == nil {
		subnet := freeSubnet(t)
		place = func(i int) (host, gossip string, in []string) {
			host = fmt.Sprintf("%s.%d", subnet, i)
			return host, host + ":7946", nil
		}
	}
	s := &shop{till: u, keys: map[string]string{}}
	s.group = newGroupAt(t, 0, policy, place)
	s.http.Transport.(*http.Transport).MaxIdleConnsPerHost = 256
	for range n {
		m := s.add()
		m.env = append(m.env, fmt.Sprintf("HEADGATE_BOOTSTRAP_EXPECT=%d", n), "HEADGATE_INSECURE=true")
	}
	s.up()
	for name := range budgets {
		var k admin.CreatedKey
		if code, apiErr, err := s.call(s.members[0], http.MethodPost, "keys", admin.NewKey{Tenant: name, ID: name}, &k); code != http.StatusOK {
			t.Fatalf("%d %s %v", code, apiErr, err)
		}
		s.keys[name] = k.Key
	}
	s.awaitSame(s.members...)
	return s
}

// living are the members that serve.
func (s *shop) living() (out []*member) {
	for _, m := range s.members {
		if m.serving.Load() {
			out = append(out, m)
		}
	}
	return out
}

// buy asks a node for an answer of a tenant. code is 0 where none came.
func (s *shop) buy(m *member, tenant string, tokens int64) (code int, word string) {
	body := fmt.Sprintf(`{"model":"m","max_tokens":%d,"tenant":%q,"messages":[{"role":"user","content":"number %d"}]}`, tokens, tenant, rand.Int64())
	code, text, _, err := s.chat(m, s.keys[tenant], body)
	if err != nil {
		return 0, ""
	}
	var e struct{ Error struct{ Code string } }
	_ = json.Unmarshal([]byte(text), &e) // an answer has none
	return code, e.Error.Code
}

// hammer buys with so many clients until the tenant's budget refuses everywhere, again and again.
func (s *shop) hammer(tenant string, clients int) map[string]int64 {
	s.t.Helper()
	var refused atomic.Int64 // in a row
	var mu sync.Mutex
	counts := map[string]int64{}
	var wg sync.WaitGroup
	deadline := time.Now().Add(patience)
	for range clients {
		wg.Go(func() {
			for refused.Load() < int64(4*clients) && time.Now().Before(deadline) {
				living := s.living() // there are some at every moment
				code, word := s.buy(living[rand.IntN(len(living))], tenant, 20+rand.Int64N(100))
				switch {
				case word == "insufficient_quota":
					refused.Add(1)
				case code == http.StatusOK:
					refused.Store(0)
				}
				mu.Lock()
				counts[strings.TrimSpace(fmt.Sprintf("%d %s", code, word))]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return counts
}

// hammerOn hammers while the test goes on.
func (s *shop) hammerOn(tenant string, clients int) <-chan map[string]int64 {
	done := make(chan map[string]int64, 1)
	go func() { done <- s.hammer(tenant, clients) }()
	return done
}

// line of the usage log, as it is exported.
type line struct {
	id, outcome string
	cost        int64
}

// usage is what the cluster's log has of a tenant.
func (s *shop) usage(m *member, tenant string) (lines []line, sum int64) {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodGet, m.admin+"/admin/v1/usage?format=csv&tenant="+url.QueryEscape(tenant), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+cliToken)
	res, err := s.http.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	rows, err := csv.NewReader(res.Body).ReadAll()
	if err != nil || res.StatusCode != http.StatusOK || len(rows) == 0 {
		s.t.Fatalf("usage: status %d, %d rows, %v", res.StatusCode, len(rows), err)
	}
	column := func(name string) int {
		i := slices.Index(rows[0], name)
		if i < 0 {
			s.t.Fatalf("usage has no column %q: %q", name, rows[0])
		}
		return i
	}
	id, outcome, cost := column("request_id"), column("outcome"), column("cost_usd")
	for _, r := range rows[1:] {
		usd, err := admin.ParseUSD(r[cost])
		if err != nil {
			s.t.Fatal(err)
		}
		lines = append(lines, line{r[id], r[outcome], int64(usd)})
		sum += int64(usd)
	}
	return lines, sum
}

// spent is what the ledger has of a tenant's only budget, once nothing is open any more.
func (s *shop) spent(m *member, tenant string) admin.Budget {
	s.t.Helper()
	list := look[[]admin.Budget](s.group, m, "budgets/"+tenant)
	if len(list) != 1 {
		s.t.Fatalf("budgets of %s: %+v", tenant, list)
	}
	return list[0]
}

// balance compares, after all was served, what the till sold, what the usage log has and what the ledger has. It
// gives what crashes made the books too high by.
func (s *shop) balance(tenant string) (served, excess int64) {
	s.t.Helper()
	m := s.living()[0]
	sales, served := s.till.of(tenant)
	lines, logged := s.usage(m, tenant)
	var crashed int64
	for _, l := range lines {
		sold, known := sales[l.id]
		switch {
		case l.outcome == "lost":
			s.t.Errorf("%s: %d nano-dollars were counted as lost, though no machine went down", tenant, l.cost)
		case l.outcome == "crashed":
			crashed++
			if excess += l.cost - sold; l.cost < sold {
				s.t.Errorf("%s: request %s was open at a crash and counts %d, but was sold for %d", tenant, l.id, l.cost, sold)
			}
		case l.cost != sold || !known && l.cost != 0:
			s.t.Errorf("%s: request %s (%s) is logged with %d and was sold for %d", tenant, l.id, l.outcome, l.cost, sold)
		}
		delete(sales, l.id)
	}
	for id, cost := range sales {
		s.t.Errorf("%s: request %s was sold for %d and is not in the usage log", tenant, id, cost)
	}
	var book admin.Budget
	eventually(s.t, fmt.Sprintf("the ledger to have heard that %s spent %s (served %s)", tenant, admin.USD(logged), admin.USD(served)), func() bool {
		book = s.spent(m, tenant)
		return int64(book.Spent) == logged
	})
	s.t.Logf("%s: the ledger has %s spent and %s outstanding", tenant, book.Spent, book.Outstanding)
	if logged != served+excess {
		s.t.Errorf("%s: logged %d, served %d, of crashes %d: the books do not balance", tenant, logged, served, excess)
	}
	s.t.Logf("%s: served $%s in %d answers, recorded $%s; %d open at crashes, $%s too much", tenant, admin.USD(served), len(lines)-int(crashed), admin.USD(logged), crashed, admin.USD(excess))
	return served, excess
}

const strictDollar = `{name: month, scope: org, amount: "1.00", period: month, mode: strict}`

// TestStrictBudgetHolds: 64 clients on five nodes spend a dollar, and not more; without faults nearly all of it,
// and with nodes that are killed and come back the books say to the nano-dollar what was sold, but for what was
// open when a node died.
func TestStrictBudgetHolds(t *testing.T) {
	heavy(t)
	u := newTill(t, "127.0.0.1:0")
	s := newShop(t, 5, u, map[string]string{"calm": strictDollar, "storm": strictDollar}, nil)
	counts := s.hammer("calm", 64)
	served, excess := s.balance("calm")
	t.Logf("calm: %v", counts)
	if served > dollar || served < 99*dollar/100 || excess != 0 {
		t.Errorf("of a dollar %s was sold, %s too much recorded", admin.USD(served), admin.USD(excess))
	}
	for what := range counts {
		if what != "200" && what != "429 insufficient_quota" {
			t.Errorf("without a fault %d answers were %s", counts[what], what)
		}
	}

	u.slow.Store(int64(20 * time.Millisecond)) // so that some are open when a node dies
	hammered := s.hammerOn("storm", 64)
	for _, m := range s.members[:4] {
		<-time.After(700 * time.Millisecond) // some of the dollar goes
		m.end(syscall.SIGKILL)
		m.up()
	}
	counts = <-hammered
	for what, n := range s.hammer("storm", 64) { // what came back with the nodes is there to be spent
		counts[what] += n
	}
	t.Logf("storm: %v", counts)
	if served, _ = s.balance("storm"); served > dollar || int64(s.spent(s.members[0], "storm").Spent) > dollar {
		t.Errorf("of a dollar %s was sold", admin.USD(served))
	}
}

// TestStrictBudgetThroughAPartition: two of five nodes are cut off from the others; neither side spends what the
// other may.
func TestStrictBudgetThroughAPartition(t *testing.T) {
	heavy(t)
	if !inside(t, "iptables") {
		return
	}
	l := newLAN(t, 5)
	u := newTill(t, serviceHost+":8000")
	s := newShop(t, 5, u, map[string]string{"split": strictDollar}, l.place)
	u.slow.Store(int64(5 * time.Millisecond))
	hammered := s.hammerOn("split", 64)
	<-time.After(500 * time.Millisecond) // some of the dollar goes
	for _, a := range s.members[:2] {
		l.cut(a, s.members[2:]...)
	}
	<-time.After(4 * time.Second) // both sides spend what they have
	l.heal(s.members...)
	counts := <-hammered
	s.awaitView(s.members...)
	for what, n := range s.hammer("split", 64) {
		counts[what] += n
	}
	t.Logf("%v", counts)
	if served, excess := s.balance("split"); served > dollar || served < 99*dollar/100 || excess != 0 {
		t.Errorf("of a dollar %s was sold, %s too much recorded", admin.USD(served), admin.USD(excess))
	}
}

// TestBudgetsWithoutQuorum: with two of three nodes gone the third spends what it has of a budget and then refuses,
// and serves who has none; once they are back all is served, and nothing is lost.
func TestBudgetsWithoutQuorum(t *testing.T) {
	heavy(t)
	u := newTill(t, "127.0.0.1:0")
	s := newShop(t, 3, u, map[string]string{"paying": `{name: month, scope: org, amount: "50.00", period: month}`, "free": ""}, nil)
	last := s.members[0]
	for range 20 {
		if code, word := s.buy(last, "paying", 50); code != http.StatusOK {
			t.Fatalf("before: %d %s", code, word)
		}
	}
	for _, m := range s.members[1:] {
		m.end(syscall.SIGKILL)
	}
	cost := int64(0)
	eventually(t, "the block to be spent", func() bool {
		code, word := s.buy(last, "paying", 50)
		if code == http.StatusOK {
			cost++
			return false
		}
		if code != http.StatusServiceUnavailable || word != "billing_unavailable" {
			t.Fatalf("without a quorum: %d %s", code, word)
		}
		return true
	})
	for range 20 {
		if code, word := s.buy(last, "paying", 50); code != http.StatusServiceUnavailable || word != "billing_unavailable" {
			t.Errorf("without a quorum and without a block: %d %s", code, word)
		}
		if code, word := s.buy(last, "free", 50); code != http.StatusOK {
			t.Errorf("who has no budget, without a quorum: %d %s", code, word)
		}
	}
	t.Logf("%d answers out of the block", cost)
	for _, m := range s.members[1:] {
		m.up()
	}
	s.awaitView(s.members...)
	for _, m := range s.members {
		eventually(t, m.name+" to spend again", func() bool { code, _ := s.buy(m, "paying", 50); return code == http.StatusOK })
	}
	if _, excess := s.balance("paying"); excess != 0 {
		t.Errorf("%s too much is recorded, though nothing was open", admin.USD(excess))
	}
}
