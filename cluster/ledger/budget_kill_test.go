package ledger

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"headgate/limiter"
)

// processEnv makes of the test binary a node of a ledger: see TestLedgerProcess.
const processEnv = "HEADGATE_TEST_LEDGER"

// process is a node in a process of its own: raft over TCP, files with fsync, and HTTP for those
// who draw. It has one of the fixed places of a cluster of three.
type process struct {
	ID, Dir, Raft, HTTP string
}

// drawAnswer is what a process says to a draw. Not known: the same has to be said again.
type drawAnswer struct {
	Known bool
	Error string // known: nothing was done
	Drawn BudgetDrawn
}

type readAnswer struct {
	Leads              bool // else the rest says nothing
	Spent, Outstanding int64
}

type proposeAnswer struct {
	Result             []byte
	NotLeader, Unknown bool
	Error              string
}

// TestLedgerProcess is no test: it is what the processes of others run, until their input ends, and so not
// longer than who started them.
func TestLedgerProcess(t *testing.T) {
	text := os.Getenv(processEnv)
	if text == "" {
		t.Skip("it is run by other tests")
	}
	var all []process // the first is this
	must(t, json.Unmarshal([]byte(text), &all))
	me := all[0]
	transport, err := raft.NewTCPTransportWithLogger(me.Raft, nil, 3, time.Second, hclog.NewNullLogger())
	must(t, err)
	l, err := Open(Config{
		ServerID: raft.ServerID(me.ID), Transport: transport, Dir: me.Dir, Peer: processPeer(all), Logger: slog.New(slog.DiscardHandler),
		SnapshotThreshold: 50, TrailingLogs: 20, SnapshotInterval: 100 * time.Millisecond,
	})
	must(t, err)
	if !l.HasState() && me.ID == all[0].ID { // the others hear of it
		var servers []raft.Server
		for _, p := range all {
			servers = append(servers, raft.Server{ID: raft.ServerID(p.ID), Address: raft.ServerAddress(p.Raft)})
		}
		must(t, l.Bootstrap(servers))
	}
	listener, err := net.Listen("tcp", me.HTTP)
	must(t, err)
	go func() { _ = http.Serve(listener, processHandler(l)) }() //nolint:gosec // it ends with the process
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func processHandler(l *Ledger) http.Handler {
	mux := http.NewServeMux()
	answer := func(path string, to func(ctx context.Context, body []byte) any) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err == nil {
				err = json.NewEncoder(w).Encode(to(r.Context(), body))
			}
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
			}
		})
	}
	answer("/draw", func(ctx context.Context, body []byte) any {
		var d BudgetDraw
		if err := json.Unmarshal(body, &d); err != nil {
			return drawAnswer{Error: err.Error()}
		}
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		drawn, err := l.DrawBudget(ctx, d)
		stale, isStale := errors.AsType[*StaleBlock](err)
		switch {
		case isStale:
			return drawAnswer{Known: true, Error: fmt.Sprintf("stale %d %d", stale.N, stale.Spent)}
		case errors.Is(err, ErrNoBudget):
			return drawAnswer{Known: true, Error: "no budget"}
		case err != nil:
			return drawAnswer{Error: err.Error()}
		}
		return drawAnswer{Known: true, Drawn: drawn}
	})
	answer("/read", func(ctx context.Context, body []byte) any {
		var k BudgetKey
		if json.Unmarshal(body, &k) != nil || l.Barrier(ctx) != nil {
			return readAnswer{}
		}
		a, _ := l.Budget(k)
		return readAnswer{Leads: true, Spent: a.Spent, Outstanding: a.Outstanding()}
	})
	answer("/propose", func(ctx context.Context, body []byte) any {
		result, _, unknown, err := l.ProposeLocal(ctx, body)
		a := proposeAnswer{Result: result, Unknown: unknown, NotLeader: errors.Is(err, ErrNotLeader)}
		if err != nil {
			a.Error = err.Error()
		}
		return a
	})
	return mux
}

// processPeer are the processes of a cluster, as their ledgers reach each other.
type processPeer []process

func (p processPeer) Propose(ctx context.Context, leader raft.ServerID, _ raft.ServerAddress, command []byte) ([]byte, bool, bool, error) {
	for _, other := range p {
		if other.ID != string(leader) {
			continue
		}
		var a proposeAnswer
		if err := other.ask(ctx, "/propose", command, &a); err != nil {
			return nil, false, true, err
		}
		if a.Error != "" && !a.NotLeader {
			return nil, false, a.Unknown, errors.New(a.Error)
		}
		return a.Result, a.NotLeader, a.Unknown, nil
	}
	return nil, true, false, nil
}

func (p *process) ask(ctx context.Context, path string, body []byte, answer any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.HTTP+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	return json.NewDecoder(resp.Body).Decode(answer)
}

// processes is a cluster of three and how to kill it.
type processes struct {
	t   *testing.T
	all []process
	run []*exec.Cmd
}

func startProcesses(t *testing.T) *processes {
	t.Helper()
	c := &processes{t: t, run: make([]*exec.Cmd, 3)}
	for i := range 3 {
		c.all = append(c.all, process{ID: fmt.Sprintf("n%d.a", i+1), Dir: filepath.Join(t.TempDir(), "data"), Raft: freeAddr(t), HTTP: freeAddr(t)})
	}
	t.Cleanup(func() {
		for i := range c.run {
			c.kill(i)
		}
	})
	for i := range c.all {
		c.start(i)
	}
	return c
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer func() { must(t, l.Close()) }()
	return l.Addr().String()
}

func (c *processes) start(i int) {
	c.t.Helper()
	text, err := json.Marshal(append([]process{c.all[i]}, append(append([]process{}, c.all[:i]...), c.all[i+1:]...)...))
	must(c.t, err)
	me, err := os.Executable()
	must(c.t, err)
	must(c.t, os.MkdirAll(c.all[i].Dir, 0o755))
	cmd := exec.Command(me, "-test.run", "^TestLedgerProcess$")
	cmd.Env = append(os.Environ(), processEnv+"="+string(text))
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	_, err = cmd.StdinPipe() // which ends with this process
	must(c.t, err)
	must(c.t, cmd.Start())
	c.run[i] = cmd
}

// kill is SIGKILL.
func (c *processes) kill(i int) {
	if cmd := c.run[i]; cmd != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		c.run[i] = nil
	}
}

// leader is the place of the process that passes a barrier, or -1.
func (c *processes) leader(ctx context.Context) int {
	body, _ := json.Marshal(BudgetKey{})
	for i := range c.all {
		var a readAnswer
		within, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		err := c.all[i].ask(within, "/read", body, &a)
		cancel()
		if err == nil && a.Leads {
			return i
		}
	}
	return -1
}

// killer is the processes' enemy until there is enough of it, or ctx ends; a majority always stays.
func (c *processes) killer(ctx context.Context, random *rand.Rand, enough func(kills int) bool) (kills int) {
	for !enough(kills) {
		pause(ctx, time.Duration(300+random.IntN(700))*time.Millisecond)
		victim := c.leader(ctx)
		if victim < 0 || random.IntN(3) == 0 {
			victim = random.IntN(len(c.all))
		}
		if ctx.Err() != nil {
			return kills
		}
		kills++
		c.kill(victim)
		pause(ctx, time.Duration(random.IntN(400))*time.Millisecond)
		c.start(victim)
	}
	return kills
}

// A history of an account: draws, and reads of what is spent and outstanding.
type (
	budgetInput struct {
		account string
		draw    BudgetDraw // of holder 0: a read
	}
	budgetOutput struct {
		unknown            bool // a draw that may or may not have been done
		refused            string
		drawn              BudgetDrawn
		spent, outstanding int64
	}
	// budgetState is an account as the history's model has it; it is compared by value.
	budgetState struct {
		spent   int64
		holders [maxLives]holderState
	}
	holderState struct {
		n                  uint64
		spent, outstanding int64
		closed             bool
	}
)

// maxLives bounds the holders that an account of the history ever sees.
const maxLives = 64

const accountAmount = 4000

// draw is what a draw does, in its plainest words.
func (s budgetState) draw(d *BudgetDraw) (budgetState, string, BudgetDrawn) {
	h := &s.holders[d.Holder]
	if d.N <= h.n {
		return s, fmt.Sprintf("stale %d %d", h.n, h.spent), BudgetDrawn{}
	}
	if h.n == 0 && d.Final && d.Spent == 0 {
		return s, "no budget", BudgetDrawn{}
	}
	more := max(0, d.Spent-h.spent)
	lost := int64(0)
	switch {
	case h.closed:
		h.outstanding = 0
	case d.Lost:
		lost, h.outstanding = max(0, h.outstanding-more), 0
	case d.Final:
		h.outstanding = 0
	default:
		h.outstanding = d.Holding
	}
	h.n, h.spent, h.closed = d.N, h.spent+more+lost, h.closed || d.Final
	s.spent += more + lost
	out := BudgetDrawn{N: d.N, Amount: accountAmount, Closed: h.closed, Lost: lost}
	if free := accountAmount - s.spent - s.outstanding(); !h.closed && free > 0 {
		if g := min(d.Want, max(min(d.Need, free), free/8)); g >= d.Least {
			out.Granted = g
			h.outstanding += g
		}
	}
	out.Spent, out.Others = s.spent, s.outstanding()-h.outstanding
	out.Free = accountAmount - s.spent - s.outstanding()
	return s, "", out
}

func (s *budgetState) outstanding() (sum int64) {
	for i := range s.holders {
		sum += s.holders[i].outstanding
	}
	return sum
}

func accounts() porcupine.Model {
	return porcupine.Model{
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			at := map[string]int{}
			var parts [][]porcupine.Operation
			for _, o := range history {
				name := o.Input.(budgetInput).account
				i, ok := at[name]
				if !ok {
					i = len(parts)
					at[name], parts = i, append(parts, nil)
				}
				parts[i] = append(parts[i], o)
			}
			return parts
		},
		Init: func() any { return budgetState{} },
		Step: func(state, input, output any) (bool, any) {
			s, in, out := state.(budgetState), input.(budgetInput), output.(budgetOutput)
			if in.draw.Holder == 0 {
				return s.spent == out.spent && s.outstanding() == out.outstanding && s.spent+s.outstanding() <= accountAmount, s
			}
			next, refused, drawn := s.draw(&in.draw)
			drawn.Time = out.drawn.Time
			return out.unknown || refused == out.refused && drawn == out.drawn, next
		},
	}
}

// budgetHistory keeps a history. It is safe for concurrent use.
type budgetHistory struct {
	mu         sync.Mutex
	operations []porcupine.Operation
	clock      int64
	draws      int
	abandoned  int
	granted    int64
}

func (r *budgetHistory) now() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clock++
	return r.clock
}

// enough says whether so many draws were answered that the history tells something.
func (r *budgetHistory) enough() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.draws > 300 && r.granted > accountAmount/4
}

func (r *budgetHistory) add(client int, call int64, in budgetInput, out budgetOutput) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clock++
	returned := r.clock
	switch {
	case out.unknown:
		returned = 1 << 62 // it may take effect whenever, or never: then it is last, where nobody looks
		r.abandoned++
	case in.draw.Holder != 0:
		r.draws++
		r.granted += out.drawn.Granted
	}
	r.operations = append(r.operations, porcupine.Operation{ClientId: client, Input: in, Output: out, Call: call, Return: returned})
}

// killSpender spends from an account as a node does: it draws ahead, spends, gives back and
// reports; says the same again until it is answered; and dies every so often, when its
// successor says what it had spent, or that nobody knows.
type killSpender struct {
	c       *processes
	r       *budgetHistory
	random  *rand.Rand
	client  int
	account string
	lives   uint64
	d       BudgetDraw
	have    int64
}

func (s *killSpender) newLife() {
	s.lives++
	key := BudgetKey{Key: limiter.Key{Tenant: "t", Limit: s.account}}
	s.d = BudgetDraw{Key: key, Terms: terms(accountAmount), Holder: uint64(s.client)*maxLives/4 + s.lives} // of at most four spenders an account
	s.have = 0
}

// run spends until ctx ends; then it says what it spent.
func (s *killSpender) run(ctx context.Context) {
	for s.newLife(); ctx.Err() == nil; {
		s.d.N++
		s.d.Want, s.d.Need = int64(s.random.IntN(60)), int64(s.random.IntN(20))
		s.d.Least = min(s.d.Need, int64(s.random.IntN(20)))
		if s.d.N == 1 {
			s.d.Want = max(s.d.Want, 1)
		}
		s.d.Holding = s.have
		crash := s.lives < maxLives/4-2 && s.random.IntN(20) == 0
		known := s.say(ctx, crash)
		spent := s.random.Int64N(min(s.have, 4) + 1)
		s.d.Spent, s.have = s.d.Spent+spent, s.have-spent
		if s.random.IntN(3) == 0 {
			s.have /= 2
		}
		if crash || !known {
			s.end(ctx)
		}
		if s.random.IntN(4) == 0 {
			s.read(ctx)
		}
	}
}

// end is what the next process does for the one that died.
func (s *killSpender) end(ctx context.Context) {
	s.d.N, s.d.Holding, s.d.Want, s.d.Need, s.d.Least = 1<<63, 0, 0, 0, 0
	s.d.Final, s.d.Lost = true, s.random.IntN(2) == 0
	s.say(ctx, false)
	s.newLife()
}

// say makes one operation of a draw, however often it is tried; dying, it is tried once.
func (s *killSpender) say(ctx context.Context, dying bool) (known bool) {
	body, err := json.Marshal(s.d)
	if err != nil {
		panic(err)
	}
	in, call := budgetInput{s.account, s.d}, s.r.now()
	for try := 0; ; try++ {
		within, cancel := context.WithTimeout(ctx, 1500*time.Millisecond)
		var a drawAnswer
		err := s.c.all[s.random.IntN(3)].ask(within, "/draw", body, &a)
		cancel()
		if err == nil && a.Known && !dying {
			s.r.add(s.client, call, in, budgetOutput{refused: a.Error, drawn: a.Drawn})
			s.have += a.Drawn.Granted
			return true
		}
		if dying || ctx.Err() != nil {
			s.r.add(s.client, call, in, budgetOutput{unknown: true})
			return false
		}
		pause(ctx, 10*time.Millisecond)
	}
}

func (s *killSpender) read(ctx context.Context) {
	body, err := json.Marshal(s.d.Key)
	if err != nil {
		panic(err)
	}
	for i := range s.c.all {
		call := s.r.now()
		within, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		var a readAnswer
		err := s.c.all[i].ask(within, "/read", body, &a)
		cancel()
		if err == nil && a.Leads {
			s.r.add(s.client, call, budgetInput{account: s.account}, budgetOutput{spent: a.Spent, outstanding: a.Outstanding})
			return
		}
	}
}

// TestBudgetsUnderSIGKILL draws from a cluster of real processes, with files and fsync, that are killed
// one after the other: what they answered is linearizable, and within the budget at every read.
func TestBudgetsUnderSIGKILL(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes some seconds")
	}
	c := startProcesses(t)
	until(t, "a leader", func() bool { return c.leader(t.Context()) >= 0 })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r := new(budgetHistory)
	seed := uint64(time.Now().UnixNano())
	var spenders sync.WaitGroup
	for id := range 8 {
		spenders.Go(func() {
			s := &killSpender{c: c, r: r, random: rand.New(rand.NewPCG(seed, uint64(id))), client: id / 2, account: fmt.Sprintf("b%d", id%2)}
			s.run(ctx)
		})
	}
	kills := c.killer(ctx, rand.New(rand.NewPCG(seed, 1000)), func(kills int) bool { return kills >= 6 && r.enough() })
	cancel()
	spenders.Wait()
	if !r.enough() {
		t.Errorf("%d kills, %d draws and %d granted: too little was tried", kills, r.draws, r.granted)
	}
	t.Logf("seed %d: %d kills, %d operations, %d of them of unknown outcome", seed, kills, len(r.operations), r.abandoned)
	if result := porcupine.CheckOperationsTimeout(accounts(), r.operations, 20*time.Second); result != porcupine.Ok {
		t.Errorf("seed %d: %d operations are %v", seed, len(r.operations), result)
	}
}

// TestCheckerFindsABlockGrantedTwice shows that the model can fail.
func TestCheckerFindsABlockGrantedTwice(t *testing.T) {
	draw := func(holder, n uint64) budgetInput {
		return budgetInput{"b", BudgetDraw{Holder: holder, N: n, Want: 3000, Need: 3000}}
	}
	grant := func(granted, others int64) budgetOutput {
		return budgetOutput{drawn: BudgetDrawn{N: 1, Granted: granted, Amount: accountAmount, Others: others, Free: accountAmount - others - granted}}
	}
	for name, c := range map[string]struct {
		second budgetOutput
		want   bool
	}{
		"once":  {grant(1000, 3000), true},
		"twice": {grant(3000, 0), false},
	} {
		r := new(budgetHistory)
		r.add(0, r.now(), draw(1, 1), grant(3000, 0))
		r.add(1, r.now(), draw(2, 1), c.second)
		if porcupine.CheckOperations(accounts(), r.operations) != c.want {
			t.Errorf("%s: it is linearizable: %v", name, !c.want)
		}
	}
}
