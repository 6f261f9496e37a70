package semantic

import (
	"crypto/sha256"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/cache"
	"headgate/cache/guard"
	"headgate/cache/threshold"
)

// axis is a unit vector of 8 dimensions whose similarity to axis(0) is cos(degrees).
func axis(degrees float64) []float32 {
	v := make([]float32, 8)
	v[0], v[1] = float32(math.Cos(degrees*math.Pi/180)), float32(math.Sin(degrees*math.Pi/180))
	return v
}

// keyOf is the partition of a name.
func keyOf(name string) cache.Key { return sha256.Sum256([]byte(name)) }

// static is a policy that serves from a similarity on, and audits nothing.
func static(from float64) threshold.Policy {
	return threshold.Policy{Mode: threshold.Static, Threshold: from, ErrorBound: 0.2, HitErrorBound: 0.5}
}

// asks is a question of tenant acme.
func asks(text string, v []float32) *Question {
	return &Question{
		Partition: keyOf("acme"), Tenant: "acme", Surface: "chat", Embedder: "e1", Text: text, Vector: v, Policy: static(0.9), Request: "r1",
	}
}

// answerTo is an answer to a question that lives an hour.
func answerTo(q *Question, body string) *cache.Entry {
	return &cache.Entry{
		Key: keyOf(q.Text), Tenant: q.Tenant, Surface: q.Surface, ContentType: "application/json", Body: []byte(body), Life: cache.Life{TTL: time.Hour, MaxTTL: time.Hour},
	}
}

// place1 is a shard with its clock.
type place1 struct {
	*shard
	t    testing.TB
	now  int64
	void map[string]bool // tags
}

func newPlace1(t testing.TB, change func(*shardConfig)) *place1 {
	p := &place1{t: t, now: 1e18, void: map[string]bool{}}
	cfg := shardConfig{
		maxBytes: 64 << 20, tenantBytes: 16 << 20, maxPartitions: 100, inserts: 1e6, crossover: func(int) int { return 0 },
		valid: func(e *cache.Entry) bool {
			return !slices.ContainsFunc(e.Tags, func(tag string) bool { return p.void[tag] })
		},
		rand: rand.New(rand.NewPCG(1, 2)),
	}
	if change != nil {
		change(&cfg)
	}
	p.shard = newShard(cfg)
	t.Cleanup(func() { p.sound() })
	return p
}

// miss learns an answer to what nobody compared.
func (p *place1) miss(q *Question, e *cache.Entry) outcome {
	return p.learn(p.now, &lesson{place: q.place(), policy: q.Policy, entry: e, text: q.Text, vector: q.Vector, came: p.now})
}

// compared learns what a comparison found.
func (p *place1) compared(q *Question, f finding, l Label, e *cache.Entry) outcome {
	return p.learn(p.now, &lesson{
		place: q.place(), policy: q.Policy, id: f.id, similarity: f.similarity, action: f.decision.Action, cell: f.decision.Cell, label: l,
		entry: e, text: q.Text, vector: q.Vector, came: p.now,
	})
}

// want fails unless a question is answered by body; "" is a miss or worse.
func (p *place1) want(q *Question, body string) finding {
	p.t.Helper()
	f := p.find(p.now, q)
	got := ""
	if f.decision.Action == threshold.Serve {
		got = string(f.answer.Body)
	}
	if got != body {
		p.t.Errorf("%q is answered by %q, not by %q: %s at %.3f, %s", q.Text, got, body, f.decision.Action, f.similarity, f.decision.Why)
	}
	return f
}

// sound fails where the books of a shard do not agree.
func (p *place1) sound() {
	p.t.Helper()
	p.tidy()
	s := p.shard
	s.mu.Lock()
	defer s.mu.Unlock()
	sum, entries := int64(0), 0
	tenants := map[string]int64{}
	for _, sc := range s.scopes {
		sum += sc.bytes
		tenants[sc.key.tenant] += sc.bytes
	}
	for key, part := range s.partitions {
		own := part.bytes
		if part.bytes != part.index.Bytes()+partitionFixed {
			p.t.Errorf("an index takes %d bytes and is counted for %d", part.index.Bytes()+partitionFixed, part.bytes)
		}
		if part.index.Len() != len(part.texts) || len(part.texts) == 0 {
			p.t.Errorf("an index holds %d vectors of %d entries", part.index.Len(), len(part.texts))
		}
		if part.place.key != key || part.pins != 0 || part.gone {
			p.t.Errorf("partition %+v is not what it should be", part.place)
		}
		for hash, e := range part.texts {
			entries++
			own += e.size + e.tables
			if e.p != part || e.hash != hash || e.gone || s.entries[e.id] != e || s.deaths[e.heapAt] != e {
				p.t.Errorf("entry %q is not where it should be", e.text)
			}
			if _, ok := part.index.Vector(e.id); !ok {
				p.t.Errorf("entry %q has no vector", e.text)
			}
			if e.about.Tenant != part.place.tenant || e.about.Surface != part.place.surface {
				p.t.Errorf("entry %q of %q is in a partition of %q", e.text, e.about.Tenant, part.place.tenant)
			}
		}
		part.scope.bytes -= own // to be scopeFixed in the end; put back below
		defer func() { part.scope.bytes += own }()
	}
	sketches := int64(0)
	for _, sc := range s.scopes {
		sketches += scopeFixed + sc.tables
		if sc.bytes != scopeFixed+sc.tables {
			p.t.Errorf("scope %v is counted for %d bytes too many", sc.key, sc.bytes-scopeFixed-sc.tables)
		}
	}
	if sketches != s.scopeBytes {
		p.t.Errorf("scopes take %d bytes and are counted for %d", sketches, s.scopeBytes)
	}
	if sum != s.bytes || entries != len(s.entries) || entries != len(s.deaths) {
		p.t.Errorf("%d bytes are counted for %d; %d entries, %d by id, %d to die", sum, s.bytes, entries, len(s.entries), len(s.deaths))
	}
	used := 0
	for name, t := range s.tenants {
		used += t.used.Len()
		if t.bytes != tenants[name] || t.bytes > s.cfg.tenantBytes {
			p.t.Errorf("tenant %s takes %d bytes and is counted for %d of %d", name, tenants[name], t.bytes, s.cfg.tenantBytes)
		}
	}
	if used != entries || s.bytes > s.cfg.maxBytes {
		p.t.Errorf("%d entries are in order of use, of %d; %d bytes of %d", used, entries, s.bytes, s.cfg.maxBytes)
	}
}

func TestAnswersNearQuestion(t *testing.T) {
	p := newPlace1(t, nil)
	q := asks("How do I reset my password?", axis(0))
	if f := p.find(p.now, q); f.decision.Action != threshold.Miss || len(p.partitions) != 0 {
		t.Errorf("an empty shard: %s with %d partitions", f.decision.Action, len(p.partitions))
	}
	if o := p.miss(q, answerTo(q, "here is how")); o != kept {
		t.Fatalf("the answer was not kept: %s", o)
	}
	f := p.want(asks("how do i reset my password", axis(20)), "here is how")
	if math.Abs(f.similarity-math.Cos(20*math.Pi/180)) > 1e-6 || f.id == 0 {
		t.Errorf("similarity %v of entry %d", f.similarity, f.id)
	}
	p.want(asks("how do i reset my password", axis(30)), "") // .866
	p.now += int64(time.Hour) - 1
	if f := p.want(q, "here is how"); f.age != time.Hour-1 {
		t.Errorf("age %s", f.age)
	}
	p.now++
	p.want(q, "")
	if len(p.entries) != 0 || len(p.partitions) != 0 {
		t.Errorf("%d entries of %d partitions are left after their time", len(p.entries), len(p.partitions))
	}
}

func TestNothingCrossesPartitions(t *testing.T) {
	p := newPlace1(t, nil)
	q := asks("what's my account balance?", axis(0))
	p.miss(q, answerTo(q, "12 dollars"))
	for name, change := range map[string]func(*Question){
		"partition":  func(q *Question) { q.Partition = keyOf("bob") },
		"tenant":     func(q *Question) { q.Tenant = "bob" }, // under the same key, which cannot be
		"surface":    func(q *Question) { q.Surface = "other" },
		"embedder":   func(q *Question) { q.Embedder = "e2" },
		"dimensions": func(q *Question) { q.Vector = []float32{1} },
	} {
		other := *q
		change(&other)
		if f := p.want(&other, ""); f.e != nil || f.id != 0 {
			t.Errorf("%s: another's entry was found", name)
		}
		if name != "partition" {
			if o := p.miss(&other, answerTo(&other, "1 dollar")); o != notPlace {
				t.Errorf("%s: an answer was put into another's partition: %s", name, o)
			}
		}
	}
	foreign := answerTo(q, "x")
	foreign.Tenant = "bob"
	if o := p.miss(asks("what", axis(80)), foreign); o != notPlace {
		t.Errorf("the answer of another tenant was kept: %s", o)
	}
	p.want(q, "12 dollars")
}

func TestLeastOnlyTightens(t *testing.T) {
	p := newPlace1(t, nil)
	q := asks("one", axis(0))
	p.miss(q, answerTo(q, "1"))
	for _, c := range []struct {
		least, degrees float64
		body           string
	}{{0, 20, "1"}, {0.93, 20, "1"}, {0.95, 20, ""}, {0, 30, ""}, {-3, 30, ""}, {0.5, 30, ""}, {1, 0, ""}, {0.999, 0, "1"}} {
		q := asks("one", axis(c.degrees))
		q.Least = c.least
		p.want(q, c.body)
	}
}

func TestShadowServesNothing(t *testing.T) {
	p := newPlace1(t, nil)
	q := asks("one", axis(0))
	q.Policy = threshold.Policy{ErrorBound: 0.2, HitErrorBound: 0.5}
	p.miss(q, answerTo(q, "1"))
	for range 200 {
		f := p.find(p.now, q)
		if f.decision.Action == threshold.Serve || !f.shadow || f.answer == nil && f.decision.Action != threshold.Miss {
			t.Fatalf("%s, shadow %t", f.decision.Action, f.shadow)
		}
		p.compared(q, f, Label{Known: true, Same: true}, nil)
	}
}

func TestSecondWhereNearestIsRefused(t *testing.T) {
	p := newPlace1(t, nil)
	off, on := asks("turn off dark mode 7", axis(0)), asks("turn on dark mode 8", axis(12))
	p.miss(off, answerTo(off, "off"))
	p.miss(on, answerTo(on, "on"))
	f := p.want(asks("Turn on dark mode 8!", axis(1)), "on")
	if len(f.refused) == 0 || math.Abs(f.similarity-math.Cos(11*math.Pi/180)) > 1e-6 || !f.probe {
		t.Errorf("refused %v, similarity %v, a probe: %t", f.refused, f.similarity, f.probe)
	}
	f = p.want(asks("turn on dark mode 9", axis(1)), "")
	if f.e != nil || f.id == 0 || f.decision.Why != whyGuards {
		t.Errorf("guards refuse both: %q with candidate %v", f.decision.Why, f.e)
	}
	if s := p.surfaces()[0]; s.Probes != 2 || s.RefusedAt[Bins-1] != 2 || s.Served != 1 || s.Missed != 1 {
		t.Errorf("%+v", s)
	}
}

func TestCandidateBeyondRefused(t *testing.T) {
	p := newPlace1(t, nil)
	for i := range 10 {
		q := asks(fmt.Sprint("turn on light ", 10+i), axis(float64(i)/10))
		p.miss(q, answerTo(q, "another"))
	}
	q := asks("turn on light 7", axis(5))
	p.miss(q, answerTo(q, "7"))
	p.want(asks("turn on light 7!", axis(0)), "7")
}

func TestTagsAndInvalidation(t *testing.T) {
	p := newPlace1(t, nil)
	for i := range 20 {
		q := asks("one"+strings.Repeat("!", i), axis(float64(i)/10))
		e := answerTo(q, fmt.Sprint(i))
		e.Tags = []string{fmt.Sprintf("t%d", i%2)}
		p.miss(q, e)
	}
	q := asks("one", axis(0))
	q.Tags = []string{"t1"}
	p.want(q, "1")
	p.void["t1"] = true
	p.want(q, "")
	q.Tags = nil
	p.want(q, "0")
	p.void["t0"] = true
	p.want(q, "")
	p.sweep(p.now)
	if n := len(p.entries); n != 0 {
		t.Errorf("%d entries are left that were seen to be invalid", n)
	}
}

func TestSameWordsReplace(t *testing.T) {
	p := newPlace1(t, nil)
	q := asks("one", axis(0))
	p.miss(q, answerTo(q, "old"))
	first := p.want(q, "old")
	p.compared(q, finding{id: first.id, similarity: 1, decision: threshold.Decision{Action: threshold.Audit}}, Label{Known: true, Same: true}, answerTo(q, "new"))
	second := p.want(q, "new")
	if second.id == first.id || len(p.entries) != 1 {
		t.Errorf("entry %x took the place of %x, %d there are", second.id, first.id, len(p.entries))
	}
	if n := second.e.obs.Len(); n != 1 {
		t.Errorf("%d observations of the answer that is the same", n)
	}
	p.compared(q, finding{id: second.id, similarity: 1, decision: threshold.Decision{Action: threshold.Audit}}, Label{Known: true}, answerTo(q, "other"))
	if third := p.want(q, "other"); third.e.obs.Len() != 0 {
		t.Errorf("%d observations of another answer", third.e.obs.Len())
	}
	late := answerTo(q, "late")
	late.Age = time.Minute
	if o := p.miss(q, late); o != keptNewer {
		t.Errorf("an older answer took the place: %s", o)
	}
	p.want(q, "other")
}

func TestLabels(t *testing.T) {
	p := newPlace1(t, nil)
	q := asks("one", axis(0))
	q.Policy.Audit = 1
	p.miss(q, answerTo(q, "1"))
	f := p.find(p.now, q)
	if f.decision.Action != threshold.Audit || f.answer == nil {
		t.Fatalf("%s", f.decision.Action)
	}
	l := &lesson{
		place: q.place(), once: 7, policy: q.Policy, id: f.id, similarity: f.similarity, action: threshold.Audit, cell: f.decision.Cell, label: Label{Known: true, Same: true},
	}
	p.learn(p.now, l)
	p.learn(p.now, l) // said twice
	if n, s := f.e.obs.Len(), p.surfaces()[0]; n != 1 || s.Same != 1 {
		t.Errorf("%d observations, %d labels", n, s.Same)
	}
	elsewhere := *l
	elsewhere.once, elsewhere.place.key = 8, keyOf("other")
	p.learn(p.now, &elsewhere)
	if n := f.e.obs.Len(); n != 1 {
		t.Errorf("a label of another partition was taken for this one's: %d observations", n)
	}
	if _, found := p.wrong(f.id, nil); !found || !p.countWrong(p.now, f.id) {
		t.Error("the entry is not there to be wrong")
	}
	if _, found := p.wrong(f.id, nil); found || !p.countWrong(p.now, f.id) {
		t.Error("it is there again, or counts no more")
	}
	gone := *l
	gone.once, gone.label.Same = 9, false
	p.learn(p.now, &gone) // of what was evicted meanwhile
	unknown := *l
	unknown.once, unknown.label.Known = 10, false
	p.learn(p.now, &unknown)
	if s := p.surfaces()[0]; s.Same != 2 || s.Different != 1 || s.Unknown != 1 || s.Budget.Unlabelled != 1 || s.Reported != 1 || s.Entries != 0 {
		t.Errorf("%+v", s)
	}
}

func TestOnlyAuditsCountForTheBudget(t *testing.T) {
	p := newPlace1(t, nil)
	q := asks("one", axis(0))
	p.miss(q, answerTo(q, "1"))
	f := p.want(q, "1")
	for _, a := range []threshold.Action{threshold.Explore, threshold.Serve, threshold.Audit} { // Serve: a verifier refused it
		f.decision.Action = a
		p.compared(q, f, Label{Known: true, Same: true}, nil)
	}
	if s := p.surfaces()[0]; s.Same != 3 || s.Budget.Audited != 1 || f.e.obs.Len() != 3 {
		t.Errorf("%d labels, %d audits, %d observations", s.Same, s.Budget.Audited, f.e.obs.Len())
	}
}

func TestMovedWhileLearning(t *testing.T) {
	p := newPlace1(t, nil)
	for i, text := range []string{"one", "two"} {
		q := asks(text, axis(float64(90*i)))
		p.miss(q, answerTo(q, text))
	}
	one := asks("one", axis(0))
	f := p.want(one, "one")
	batch := p.batch(f.e.p, p.now)
	if len(batch) != 2 {
		t.Fatalf("%d entries to move", len(batch))
	}
	f.decision.Action = threshold.Audit
	p.compared(one, f, Label{Known: true, Same: true}, nil)
	p.release(batch)
	again := p.batch(f.e.p, p.now)
	if len(p.entries) != 1 || len(again) != 1 || again[0].text != "one" {
		t.Fatalf("%d entries are left, %d to move", len(p.entries), len(again))
	}
	other := newPlace1(t, nil)
	for _, h := range append(batch, again...) {
		if o := other.insert(p.now, &f.e.p.place, &one.Policy, &h.fresh, true); o != kept {
			t.Errorf("%q: %s", h.text, o)
		}
	}
	p.release(again)
	if g := other.want(one, "one"); g.e.obs.Len() != 1 || g.id != f.id || len(other.entries) != 2 || len(p.partitions) != 0 {
		t.Errorf("%d observations of %x; %d entries there, %d partitions here", g.e.obs.Len(), g.id, len(other.entries), len(p.partitions))
	}
}

func TestNearInVectorFarInWords(t *testing.T) {
	p := newPlace1(t, nil)
	stored := asks("How do I reset my password?", axis(0))
	p.miss(stored, answerTo(stored, "so"))
	f := p.want(asks("what steps are needed for a login recovery", axis(5)), "")
	if f.e == nil || !f.probe || f.decision.Action != threshold.Explore || f.decision.Why != whyProbe {
		t.Errorf("%s: %s, refused %v", f.decision.Action, f.decision.Why, f.refused)
	}
}

// TestOnlyIsNotAudited has a question that no model can be asked: chance keeps no answer from it, all else does.
func TestOnlyIsNotAudited(t *testing.T) {
	p := newPlace1(t, nil)
	q := asks("one", axis(0))
	q.Policy.Audit = 1
	p.miss(q, answerTo(q, "1"))
	p.want(q, "")
	only := *q
	only.Only = true
	p.want(&only, "1")
	if b := p.surfaces()[0].Budget; b.Served != 1 || b.Unlabelled != 1 {
		t.Errorf("what chance would have audited is not missed by the budget: %+v", b)
	}
	near := only
	near.Least = 1
	p.want(&near, "")
	shadow := only
	shadow.Policy.Mode = threshold.Shadow
	p.want(&shadow, "")
	f := p.find(p.now, q)
	for range 40 {
		p.compared(q, f, Label{Known: true}, nil)
	}
	if f := p.want(&only, ""); f.decision.Action != threshold.Audit || !p.surfaces()[0].Budget.Tripped {
		t.Errorf("%+v", f.decision)
	}
}

// TestUnreadableIsNotKept has questions that guards refuse whatever they are held against.
func TestUnreadableIsNotKept(t *testing.T) {
	for name, text := range map[string]string{
		"long": strings.Repeat("reset my password now please ", 60),
		"code": "what does this do?\n```\nexit 1\n```",
	} {
		p := newPlace1(t, nil)
		q := asks(text, axis(0))
		if o := p.miss(q, answerTo(q, "so")); o != notRead || len(p.entries) != 0 || len(p.partitions) != 0 || p.counts.dropped[notRead] != 1 {
			t.Errorf("%s: %s, %d entries of %d partitions", name, o, len(p.entries), len(p.partitions))
		}
		readable := asks("reset my password now", axis(0))
		for range 2 { // without a partition, and with one
			if f := p.want(q, ""); f.decision.Action != threshold.Miss || f.decision.Why != whyRead || f.e != nil || f.id != 0 || len(f.refused) != 0 {
				t.Errorf("%s: %+v", name, f)
			}
			p.miss(readable, answerTo(readable, "so"))
		}
	}
}

func TestInsertsWhatIsAnother(t *testing.T) {
	for _, c := range []struct {
		name    string
		label   Label
		entries int
		class   bool // the same as the candidate's
	}{
		{"same", Label{Known: true, Same: true}, 1, true},
		{"another", Label{Known: true, AnswerHash: 5}, 2, false},
		{"unknown", Label{}, 2, false},
	} {
		p := newPlace1(t, nil)
		q := asks("one", axis(0))
		q.Policy.Audit = 1
		p.miss(q, answerTo(q, "1"))
		near := asks("One", axis(5))
		near.Policy.Audit = 1
		p.compared(near, p.find(p.now, near), c.label, answerTo(near, "2"))
		if len(p.entries) != c.entries {
			t.Errorf("%s: %d entries", c.name, len(p.entries))
		}
	}
}

func TestClasses(t *testing.T) {
	p := newPlace1(t, nil)
	put := func(text string, degrees float64, l Label) uint64 {
		q := asks(text, axis(degrees))
		p.learn(p.now, &lesson{place: q.place(), policy: q.Policy, label: l, entry: answerTo(q, text), text: text, vector: q.Vector, came: p.now})
		return p.partitions[q.Partition].texts[textHash(p.seed, text)].class
	}
	a := put("a", 0, Label{AnswerHash: 1, AnswerVector: axis(0), Answers: 0.9})
	b := put("b", 10, Label{AnswerHash: 2, AnswerVector: axis(10), Answers: 0.9}) // says the same in other words
	c := put("c", 20, Label{AnswerHash: 2})
	d := put("d", 30, Label{AnswerHash: 3, AnswerVector: axis(60), Answers: 0.9})
	e := put("e", 40, Label{})
	f := put("f", 50, Label{AnswerVector: axis(60), Answers: 0.9})
	q := asks("g", axis(1)) // near a, whose answer it is not, by what the words say; they are too alike for the vectors
	near := p.partitions[q.Partition].texts[textHash(p.seed, "a")]
	p.learn(p.now, &lesson{
		place: q.place(), policy: q.Policy, id: near.id, similarity: 0.99, action: threshold.Audit, entry: answerTo(q, "g"), text: "g", vector: q.Vector, came: p.now,
		label: Label{Known: true, AnswerVector: axis(1), Answers: 0.9},
	})
	if g := p.partitions[q.Partition].texts[textHash(p.seed, "g")].class; g == a {
		t.Error("an answer is of the class of one that it was found to differ from")
	}
	if a != b || b != c || d == a || e == a || e == d || f != d {
		t.Errorf("classes %x %x %x %x %x %x", a, b, c, d, e, f)
	}
}

func TestFloodEvictsItsOwn(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes = 4<<20, 1<<20 })
	own := asks("mine", axis(0))
	p.miss(own, answerTo(own, "mine"))
	flood := func(i int) *Question {
		return &Question{
			Partition: keyOf(fmt.Sprint("flood", i%3)), Tenant: "flood", Surface: "chat", Embedder: "e1", Text: fmt.Sprint("question ", i), Vector: axis(float64(i % 360)), Policy: static(0.9),
		}
	}
	for i := range 2000 {
		q := flood(i)
		if o := p.miss(q, answerTo(q, strings.Repeat("x", 1500))); o != kept {
			t.Fatalf("answer %d: %s", i, o)
		}
		if b := p.tenants["flood"].bytes; b > 1<<20 {
			t.Fatalf("a tenant takes %d bytes", b)
		}
	}
	p.want(own, "mine")
	if p.counts.evicted < 1000 || p.tenants["flood"].used.Len() < 100 {
		t.Errorf("%d evicted, %d left", p.counts.evicted, p.tenants["flood"].used.Len())
	}
	q := flood(1999)
	p.want(q, strings.Repeat("x", 1500))
	large := flood(2001)
	if o := p.miss(large, answerTo(large, noise(400<<10))); o != notLarge {
		t.Errorf("an answer of more than a quarter of a tenant's share: %s", o)
	}
}

// noise does not shrink.
func noise(n int) string {
	r := rand.New(rand.NewPCG(3, 4))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return string(b)
}

func TestUsedEntriesStay(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.tenantBytes = 1 << 20 })
	used, unused := asks("one", axis(0)), asks("two", axis(120))
	p.miss(used, answerTo(used, "1"))
	p.miss(unused, answerTo(unused, "2"))
	for i := range 1000 {
		q := asks(fmt.Sprint("question ", i), axis(200+float64(i%100)))
		p.miss(q, answerTo(q, noise(1500)))
		if i%100 == 0 {
			p.want(used, "1")
		}
	}
	p.want(used, "1")
	p.want(unused, "")
}

func TestLearnedServesInTheEnd(t *testing.T) {
	const topics, wordings = 40, 3
	for name, c := range map[string]struct {
		same   bool
		answer func(i int) uint64 // which answer the model gives to the question i
		least  int
		most   int
	}{
		"an answer to each topic": {true, func(i int) uint64 { return uint64(i%topics + 1) }, 1000, 2000},
		"always another":          {false, func(i int) uint64 { return uint64(i + 1) }, 0, 100},
		"one to all":              {true, func(int) uint64 { return 1 }, 0, 0}, // as in an outage: it says nothing
	} {
		p := newPlace1(t, nil)
		served := 0
		for i := range 2000 {
			topic, wording := i%topics, i/topics%wordings
			v := make([]float32, topics+wordings)
			v[topic], v[topics+wording] = 0.995, 0.0998749
			q := asks(fmt.Sprint("topic", topic, strings.Repeat("!", wording)), v)
			q.Policy = threshold.Policy{Mode: threshold.Learned, ErrorBound: 0.2, HitErrorBound: 0.2, Audit: 0.05}
			f := p.find(p.now, q)
			if f.decision.Action == threshold.Serve {
				served++
				continue
			}
			p.compared(q, f, Label{Known: f.answer != nil, Same: c.same, AnswerHash: c.answer(i)}, answerTo(q, "x"))
			p.now += int64(time.Second)
		}
		if served < c.least || served > c.most {
			t.Errorf("%s: %d of 2,000 served", name, served)
		}
	}
}

func TestScopesAreForgotten(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes = 1<<30, 1<<28 })
	used, unused := asks("one", axis(0)), asks("one", axis(0))
	unused.Surface = "other"
	p.find(p.now, unused)
	for range 30 {
		p.find(p.now, used)
		p.now += int64(time.Hour)
		p.sweep(p.now)
	}
	if s := p.surfaces(); len(s) != 1 || s[0].Surface != used.Surface || s[0].Missed != 30 {
		t.Errorf("%+v", s)
	}
	p.now += 2 * scopeFor
	p.sweep(p.now)
	if len(p.scopes) != 0 || len(p.tenants) != 0 || p.bytes != 0 {
		t.Errorf("%d scopes, %d tenants, %d bytes", len(p.scopes), len(p.tenants), p.bytes)
	}
	for i := range maxScopes + 10 {
		q := asks("one", axis(0))
		q.Surface = fmt.Sprint(i)
		p.now++
		p.find(p.now, q)
	}
	if len(p.scopes) != maxScopes {
		t.Errorf("%d scopes", len(p.scopes))
	}
	small := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes = 1<<20, 1<<18 })
	for i := range 100 {
		q := asks("one", axis(0))
		q.Surface = fmt.Sprint(i)
		small.find(small.now, q)
	}
	if small.bytes > 1<<17 || len(small.scopes) == 0 {
		t.Errorf("%d scopes take %d bytes of %d", len(small.scopes), small.bytes, 1<<18)
	}
}

func TestManyTenantsShareEvenly(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes = 1<<20, 1<<19 })
	put := func(tenant string, i int) {
		q := &Question{Partition: keyOf(tenant), Tenant: tenant, Surface: "s", Embedder: "e", Text: fmt.Sprint("q", i), Vector: axis(float64(i % 360)), Policy: static(0.9)}
		p.miss(q, answerTo(q, noise(1500)))
	}
	for i := range 10 {
		put("small", i)
	}
	for i := range 500 {
		for j := range 4 {
			put(fmt.Sprint("large", j), i)
		}
	}
	if n := p.tenants["small"].used.Len(); n != 10 {
		t.Errorf("%d of 10 entries are left of a tenant that takes less than an equal part", n)
	}
}

func TestRateOfInserts(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.inserts = 2 })
	put := func(i int) outcome {
		q := asks(fmt.Sprint("question ", i), axis(float64(i)))
		return p.miss(q, answerTo(q, "x"))
	}
	n := 0
	for i := range 50 {
		if put(i) == kept {
			n++
		}
	}
	if n != 20 {
		t.Errorf("%d inserts at once, of 20", n)
	}
	p.now += int64(3 * time.Second)
	n = 0
	for i := range 50 {
		if put(100+i) == kept {
			n++
		}
	}
	if n != 6 || p.counts.dropped[notOften] != 74 {
		t.Errorf("%d inserts after three seconds, of 6; %d refused", n, p.counts.dropped[notOften])
	}
}

func TestPartitionsAreBounded(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.maxPartitions = 4 })
	put := func(tenant string, i int) *Question {
		q := &Question{Partition: keyOf(fmt.Sprint(tenant, i)), Tenant: tenant, Surface: "s", Embedder: "e", Text: "q", Vector: axis(0), Policy: static(0.9)}
		if o := p.miss(q, answerTo(q, tenant)); o != kept {
			t.Fatalf("%s", o)
		}
		return q
	}
	own, first := put("own", 0), put("flood", 0)
	put("flood", 1)
	for i := 2; i < 20; i++ {
		p.want(first, "flood") // is used
		put("flood", i)
	}
	p.want(own, "own")
	p.want(first, "flood")
	if len(p.partitions) != 4 {
		t.Errorf("%d partitions", len(p.partitions))
	}
}

func TestSpaceIsGivenBack(t *testing.T) {
	p := newPlace1(t, nil)
	for i := range 2000 {
		q := asks(fmt.Sprint("question ", i), axis(float64(i)/6))
		e := answerTo(q, "x")
		if i >= 100 {
			e.Life.TTL = time.Minute
		}
		p.miss(q, e)
	}
	before := p.bytes
	p.now += int64(2 * time.Minute)
	for p.sweep(p.now) {
	}
	p.shrink(t.Context())
	if len(p.entries) != 100 || p.bytes > before/4 {
		t.Errorf("%d entries take %d bytes, where 2,000 took %d", len(p.entries), p.bytes, before)
	}
	q := asks("question 7", axis(7./6))
	p.want(q, "x")
}

// TestShard does anything in any order, and holds the shard against a list.
func TestShard(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes, c.maxPartitions = 1<<20, 100<<10, 5 })
		type stored struct {
			body string
			dies int64
			tag  string
		}
		model := map[string]map[string]stored{} // by partition, of what was put and may be there
		texts := []string{"one", "One", "ONE", "one?", "oNe", "onE"}
		draw := func() (*Question, string) {
			tenant := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "tenant")
			name := tenant + rapid.SampledFrom([]string{"1", "2", "3"}).Draw(rt, "partition")
			q := &Question{
				Partition: keyOf(name), Tenant: tenant, Surface: "s", Embedder: "e", Policy: static(0.9), Text: rapid.SampledFrom(texts).Draw(rt, "text"),
				Vector: axis(float64(rapid.IntRange(0, 40).Draw(rt, "degrees"))),
			}
			return q, name
		}
		n := 0
		rt.Repeat(map[string]func(*rapid.T){
			"put": func(*rapid.T) {
				q, name := draw()
				n++
				body := fmt.Sprint(name, " ", n, strings.Repeat("x", rapid.SampledFrom([]int{0, 1000, 20_000}).Draw(rt, "size")))
				e := answerTo(q, body)
				e.Life.TTL = time.Duration(rapid.IntRange(1, 100).Draw(rt, "ttl")) * time.Second
				e.Tags = []string{rapid.SampledFrom([]string{"x", "y", "z"}).Draw(rt, "tag")}
				if p.miss(q, e) == kept {
					if model[name] == nil {
						model[name] = map[string]stored{}
					}
					model[name][q.Text] = stored{body, p.now + int64(e.Life.TTL), e.Tags[0]}
				}
			},
			"ask": func(*rapid.T) {
				q, name := draw()
				f := p.find(p.now, q)
				if f.answer == nil {
					return
				}
				m, ok := model[name][f.e.text]
				if !ok || m.body != string(f.answer.Body) || m.dies <= p.now || p.void[m.tag] {
					rt.Fatalf("%q of %s is answered by %.40q, where %.40q was put", f.e.text, name, f.answer.Body, m.body)
				}
			},
			"wait": func(*rapid.T) { p.now += int64(rapid.IntRange(0, 30).Draw(rt, "seconds")) * 1e9 },
			"sweep": func(*rapid.T) {
				p.sweep(p.now)
				for _, e := range p.entries {
					if e.dies <= p.now {
						rt.Fatalf("%q is there after its time", e.text)
					}
				}
			},
			"wrong": func(*rapid.T) {
				q, name := draw()
				if f := p.find(p.now, q); f.e != nil {
					p.wrong(f.e.id, nil)
					p.countWrong(p.now, f.e.id)
					delete(model[name], f.e.text)
				}
			},
			"void": func(*rapid.T) {
				p.void[rapid.SampledFrom([]string{"x", "y", "z"}).Draw(rt, "tag")] = rapid.Bool().Draw(rt, "is")
			},
			"shrink": func(*rapid.T) { p.shrink(t.Context()) },
			"":       func(*rapid.T) { p.sound() },
		})
		if t.Failed() {
			rt.Fatal("the books do not agree")
		}
	})
}

// poolCells is how many cells a pool has at most.
const poolCells = 50 * 64

// crowd has a surface's pool hold so many cells, and four nodes tell as many.
func (p *place1) crowd(surface string, cells int) *scope {
	q := asks("one", axis(0))
	q.Surface = surface
	p.find(p.now, q)
	sc := p.scopes[scopeKey{q.Tenant, q.Surface, q.Embedder}]
	if sc == nil {
		return nil
	}
	for c := range cells {
		sc.pool.Seen(threshold.Cell(c))
	}
	for node := range uint64(4) {
		if err := p.hear(p.now, node+1, sc.key, &q.Policy, sc.pool.Own(), sc.budget.Own()); err != nil {
			p.t.Error(err)
		}
	}
	return sc
}

// TestPoolsAreBounded has more pools grow full than may be kept.
func TestPoolsAreBounded(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes = 8<<20, 2<<20 })
	used := asks("used", axis(0))
	p.miss(used, answerTo(used, "used"))
	other := asks("of another", axis(0))
	other.Tenant, other.Partition = "bob", keyOf("bob")
	p.miss(other, answerTo(other, "bob"))
	for i := range 40 {
		p.now += int64(time.Second)
		name := fmt.Sprint("surface ", i)
		q := asks("one", axis(0))
		q.Surface, q.Partition = name, keyOf(name)
		p.miss(q, answerTo(q, "x"))
		p.crowd(name, poolCells)
		p.want(used, "used")
		if s := p.tenants["acme"]; s.scopeBytes > p.cfg.tenantBytes/2 {
			t.Fatalf("%d surfaces take %d bytes of %d", s.scopes, s.scopeBytes, p.cfg.tenantBytes/2)
		}
	}
	p.now += forgetEvery
	p.sweep(p.now)
	real := int64(0)
	for _, sc := range p.scopes {
		real += int64(sc.pool.Bytes()+sc.budget.Bytes()) + scopeFixed
	}
	if real > p.scopeBytes || p.scopeBytes < 1<<19 || p.bytes > p.cfg.maxBytes {
		t.Errorf("sketches take %d bytes and are counted for %d; all take %d", real, p.scopeBytes, p.bytes)
	}
	p.want(other, "bob")
	p.want(used, "used")
}

// TestOnePoolIsBounded has the only surface of a tenant hear more than may be kept: what others told goes, what it counted
// itself stays.
func TestOnePoolIsBounded(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes = 1<<20, 1<<18 })
	sc := p.crowd("chat", poolCells)
	p.now += forgetEvery
	p.sweep(p.now)
	if got := p.surfaces(); len(got) != 1 || sc.tables+scopeFixed > p.cfg.tenantBytes/2 || len(sc.pool.Own()) < poolCells {
		t.Errorf("%+v; %d bytes of sketches", got, sc.tables)
	}
}

// TestBytesAreHeld holds what is counted against what the heap grows by.
func TestBytesAreHeld(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector takes memory of its own")
	}
	for _, c := range []struct {
		name             string
		partitions, each int
		body             int
		cells            int // of the pools of as many surfaces more
	}{
		{"one partition", 1, 1700, 600, 0},
		{"one entry each", 1500, 1, 600, 0},
		{"large answers", 20, 20, 20_000, 0},
		{"full pools", 1, 10, 600, poolCells},
		{"half of the cells", 1, 10, 600, poolCells / 2},
	} {
		heap := func() int64 {
			runtime.GC()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return int64(m.HeapAlloc)
		}
		p := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes, c.maxPartitions = 1<<30, 1<<30, 10_000 })
		vectors := newClustered()
		_ = guard.Parse("loads its tables")
		fill := func(from int) {
			if c.cells > 0 {
				for i := range 50 {
					p.crowd(fmt.Sprint("surface ", from, " ", i), c.cells)
				}
			}
			p.now += forgetEvery
			p.sweep(p.now)
			for i := range c.partitions {
				for j := range c.each {
					q := vectors.question(j)
					q.Text += fmt.Sprint(i, j)
					q.Partition = keyOf(fmt.Sprint(from, i))
					if o := p.miss(q, answerTo(q, noise(c.body))); o != kept {
						t.Fatal(o)
					}
				}
			}
		}
		fill(0) // tables that all share, and free lists
		before, counted := heap(), p.bytes
		fill(1)
		grown, counted := heap()-before, p.bytes-counted
		if ratio := float64(counted) / float64(grown); ratio < 0.85 || ratio > 1.3 {
			t.Errorf("%s: %d bytes are counted, where the heap grew by %d: %.2f", c.name, counted, grown, ratio)
		}
		runtime.KeepAlive(p)
	}
}
