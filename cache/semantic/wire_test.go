package semantic

import (
	"context"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"headgate/cache"
	pb "headgate/cache/semantic/semanticpb"
	"headgate/cache/threshold"
)

// alone is a Cache without other nodes, of time 1e18, that never runs.
func alone(t testing.TB) *Cache {
	c, err := New(Config{
		Ring: func(cache.Key) []string { return nil }, Client: func(string) (grpc.ClientConnInterface, error) { return nil, errBroken },
		Peers: func() []string { return nil }, Valid: func(*cache.Entry) bool { return true }, Now: func() int64 { return 1e18 }, Rand: rand.New(rand.NewPCG(1, 2)),
		MaxBytes: 64 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func someMoved(q *Question) *pb.Moved {
	f := &fresh{id: 5, text: q.Text, vector: q.Vector, entry: answerTo(q, "so"), class: 6, answer: 7, meaning: []int8{-128, 0, 127}, hits: []threshold.Cell{1, 2}}
	f.entry.Tags = []string{"a", "\xff"}
	f.entry.Age = time.Minute
	return f.encode()
}

func someLesson(q *Question) *lesson {
	return &lesson{
		place: q.place(), once: 3, policy: q.Policy, id: 4, similarity: 0.5, action: threshold.Audit, cell: 9,
		label: Label{Same: true, Known: true, AnswerHash: 8, AnswerVector: axis(3), Answers: 0.92}, entry: answerTo(q, "so"), text: q.Text, vector: q.Vector, came: 1e18,
	}
}

func TestWireKeepsAll(t *testing.T) {
	q := asks("one", axis(0))
	q.Policy, q.Least, q.Tags = threshold.Policy{Mode: threshold.Learned, Threshold: 0.1, ErrorBound: 0.2, HitErrorBound: 0.3, Audit: 0.4}, 0.7, []string{"a", "\xff"}
	q.Verify, q.Only = true, true
	got, err := decodeQuestion(encodeQuestion(q))
	if want := *q; err != nil {
		t.Error(err)
	} else if want.Request = ""; !reflect.DeepEqual(*got, want) {
		t.Errorf("%+v", got)
	}
	l, err := decodeLesson(someLesson(q).encode(1e18+int64(time.Second)), 1e18)
	want := someLesson(q)
	want.entry.Age = time.Second
	if err != nil || !reflect.DeepEqual(l, want) {
		t.Errorf("%+v, not %+v: %v", l, want, err)
	}
	p := q.place()
	m, err := decodeMoved(someMoved(q), &p)
	if err != nil || m.id != 5 || m.class != 6 || m.answer != 7 || len(m.meaning) != 3 || m.meaning[0] != -128 || len(m.hits) != 2 || m.entry.Age != time.Minute || m.entry.Tags[1] != "\xff" {
		t.Errorf("%+v: %v", m, err)
	}
	a := Answer{
		Action: threshold.Audit, Shadow: true, Entry: answerTo(q, "so"), EntryID: formatID(77), CachedText: "ONE", Similarity: 0.9, Threshold: 0.8, Tau: 0.7,
		Confidence: 0.6, unaudited: true, Age: time.Second, Why: whyLeast, id: 77, cell: 5,
	}
	a.Entry.Tags = []string{"\xff", "b", "a"}
	sure := a
	a.Action, a.Shadow, a.Borderline, a.pending = threshold.Serve, false, true, true
	for _, a := range []Answer{a, sure} {
		keepsAnswer(t, a, q)
	}
}

func keepsAnswer(t *testing.T, a Answer, q *Question) {
	t.Helper()
	b, err := decodeAnswer(encodeAnswer(&a), q)
	if b.Entry != nil {
		b.Entry.Age = 0
	}
	if err != nil || !reflect.DeepEqual(a, b) {
		t.Errorf("%+v, not %+v: %v", b, a, err)
	}
}

func TestPeersAreNotBelieved(t *testing.T) {
	q := asks("one", axis(0))
	nan := float32(math.NaN())
	for name, change := range map[string]func(*pb.FindRequest){
		"partition": func(m *pb.FindRequest) { m.Place.Partition = m.Place.Partition[1:] },
		"no place":  func(m *pb.FindRequest) { m.Place = nil },
		"tenant":    func(m *pb.FindRequest) { m.Place.Tenant = make([]byte, maxName+1) },
		"empty":     func(m *pb.FindRequest) { m.Text = nil },
		"long":      func(m *pb.FindRequest) { m.Text = make([]byte, maxText+1) },
		"no vector": func(m *pb.FindRequest) { m.Vector = nil },
		"length":    func(m *pb.FindRequest) { m.Vector = []float32{1, 1} },
		"zero":      func(m *pb.FindRequest) { m.Vector = []float32{0, 0} },
		"nan":       func(m *pb.FindRequest) { m.Vector = []float32{1, nan} },
		"dim":       func(m *pb.FindRequest) { m.Vector = append([]float32{1}, make([]float32, 5000)...) },
		"mode":      func(m *pb.FindRequest) { m.Policy.Mode = 260 },
		"threshold": func(m *pb.FindRequest) { m.Policy.Threshold = math.NaN() },
		"serve all": func(m *pb.FindRequest) { m.Policy.Threshold = 0 },
		"no policy": func(m *pb.FindRequest) { m.Policy.Mode, m.Policy.Threshold = uint32(threshold.Static), -1 },
		"bound":     func(m *pb.FindRequest) { m.Policy.ErrorBound = -1 },
		"least":     func(m *pb.FindRequest) { m.Least = math.NaN() },
		"tags":      func(m *pb.FindRequest) { m.Tags = make([][]byte, maxTags+1) },
	} {
		m := encodeQuestion(q)
		change(m)
		if _, err := decodeQuestion(m); err == nil {
			t.Errorf("find: %s is taken", name)
		}
	}
	for name, change := range map[string]func(*pb.LearnRequest){
		"tenant":     func(m *pb.LearnRequest) { m.Entry.Tenant = []byte("bob") },
		"surface":    func(m *pb.LearnRequest) { m.Entry.Surface = []byte("other") },
		"body":       func(m *pb.LearnRequest) { m.Entry.Body = make([]byte, maxBody+1) },
		"key":        func(m *pb.LearnRequest) { m.Entry.Key = nil },
		"ttl":        func(m *pb.LearnRequest) { m.Entry.Ttl = -1 },
		"similarity": func(m *pb.LearnRequest) { m.Similarity = math.NaN() },
		"above":      func(m *pb.LearnRequest) { m.Similarity = 1.5 },
		"action":     func(m *pb.LearnRequest) { m.Action = 4 },
		"vector":     func(m *pb.LearnRequest) { m.Vector = nil },
		"text":       func(m *pb.LearnRequest) { m.Text = nil },
		"meaning":    func(m *pb.LearnRequest) { m.Meaning = []float32{2} },
		"answers":    func(m *pb.LearnRequest) { m.Answers = 2 },
		"serve all":  func(m *pb.LearnRequest) { m.Policy.Threshold = 0 },
		"settled":    func(m *pb.LearnRequest) { m.Settles, m.Entry = true, nil }, // an audit
	} {
		m := someLesson(q).encode(1e18)
		change(m)
		if _, err := decodeLesson(m, 1e18); err == nil {
			t.Errorf("learn: %s is taken", name)
		}
	}
	p := q.place()
	for name, change := range map[string]func(*pb.Moved){
		"id":           func(m *pb.Moved) { m.Id = 0 },
		"class":        func(m *pb.Moved) { m.Class = 0 },
		"tenant":       func(m *pb.Moved) { m.Entry.Tenant = []byte("bob") },
		"no entry":     func(m *pb.Moved) { m.Entry = nil },
		"vector":       func(m *pb.Moved) { m.Vector = []float32{3} },
		"text":         func(m *pb.Moved) { m.Text = []byte(strings.Repeat("x", maxText+1)) },
		"hits":         func(m *pb.Moved) { m.Hits = make([]uint32, keptHits+1) },
		"observations": func(m *pb.Moved) { m.Observations = make([]byte, maxObs+1) },
		"meaning":      func(m *pb.Moved) { m.Meaning = make([]byte, 5000) },
	} {
		m := someMoved(q)
		change(m)
		if _, err := decodeMoved(m, &p); err == nil {
			t.Errorf("move: %s is taken", name)
		}
	}
	for name, change := range map[string]func(*pb.FindResponse){
		"action":    func(m *pb.FindResponse) { m.Action = 259 },
		"no entry":  func(m *pb.FindResponse) { m.Entry = nil },
		"tenant":    func(m *pb.FindResponse) { m.Entry.Tenant = []byte("bob") },
		"nan":       func(m *pb.FindResponse) { m.Similarity = math.NaN() },
		"inf":       func(m *pb.FindResponse) { m.Confidence = math.Inf(1) },
		"reasons":   func(m *pb.FindResponse) { m.Refused = make([]*pb.Reason, maxReasons+1) },
		"why":       func(m *pb.FindResponse) { m.Why = make([]byte, maxWhy+1) },
		"no id":     func(m *pb.FindResponse) { m.Id = 0 },
		"tags":      func(m *pb.FindResponse) { m.Entry.Tags = m.Entry.Tags[1:] },
		"too old":   func(m *pb.FindResponse) { m.Entry.Age = m.Entry.Ttl + 1 },
		"uncounted": func(m *pb.FindResponse) { m.Borderline, m.Uncounted = true, true }, // nobody has a verifier
	} {
		tagged := *q
		tagged.Tags = []string{"faq"}
		e := answerTo(q, "so")
		e.Tags = []string{"faq", "other"}
		m := encodeAnswer(&Answer{Action: threshold.Serve, Entry: e, Similarity: 0.95, Age: e.Life.TTL, id: 7})
		if _, err := decodeAnswer(m, &tagged); err != nil {
			t.Fatal(err)
		}
		change(m)
		if _, err := decodeAnswer(m, &tagged); err == nil {
			t.Errorf("answer: %s is taken", name)
		}
	}
	s := &server{c: alone(t)}
	if _, err := s.Wrong(context.Background(), &pb.WrongRequest{}); err == nil {
		t.Error("wrong: a report of nothing is taken")
	}
	for name, m := range map[string]*pb.TellRequest{
		"nobody":   {},
		"itself":   {Node: s.c.node},
		"name":     {Node: 9, Sketches: []*pb.Sketch{{Tenant: make([]byte, maxName+1)}}},
		"sketch":   {Node: 9, Sketches: []*pb.Sketch{{Pool: []byte("nonsense"), Budget: []byte("nonsense")}}},
		"policy":   {Node: 9, Sketches: []*pb.Sketch{{Policy: &pb.Policy{Audit: 2}}}},
		"all":      {Node: 9, Sketches: []*pb.Sketch{{Policy: &pb.Policy{Mode: uint32(threshold.Static)}}}},
		"too many": {Node: 9, Sketches: make([]*pb.Sketch, maxTold+1)},
	} {
		if _, err := s.Tell(context.Background(), m); err == nil {
			t.Errorf("tell: %s is taken", name)
		}
	}
}

// FuzzPeers has a node hear anything: it stays whole, and says the same of what it took.
func FuzzPeers(f *testing.F) {
	q := asks("one", axis(0))
	for kind, m := range []proto.Message{
		encodeQuestion(q), someLesson(q).encode(1e18), someMoved(q), &pb.TellRequest{Node: 9, Sketches: []*pb.Sketch{{Tenant: []byte("a")}}},
		encodeAnswer(&Answer{Action: threshold.Serve, Entry: answerTo(q, "so"), Similarity: 0.95, id: 7}),
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(kind), b)
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		c := alone(t)
		s, ctx := &server{c: c}, context.Background()
		switch kind % 5 {
		case 0:
			m := &pb.FindRequest{}
			if proto.Unmarshal(b, m) != nil {
				return
			}
			if q, err := decodeQuestion(m); err == nil {
				if twice, err := decodeQuestion(encodeQuestion(q)); err != nil || !reflect.DeepEqual(q, twice) {
					t.Errorf("%+v is %+v the second time: %v", q, twice, err)
				}
				if a, err := s.Find(ctx, m); err != nil || a.GetAction() != 0 {
					t.Errorf("an empty node has %v, %v", a, err)
				}
			}
		case 1:
			m := &pb.LearnRequest{}
			if proto.Unmarshal(b, m) == nil {
				_, _ = s.Learn(ctx, m)
			}
		case 2:
			m, p := &pb.Moved{}, q.place()
			if proto.Unmarshal(b, m) != nil {
				return
			}
			if x, err := decodeMoved(m, &p); err == nil {
				c.shard.insert(1e18, &p, &q.Policy, x, true)
			}
		case 3:
			m := &pb.TellRequest{}
			if proto.Unmarshal(b, m) == nil {
				_, _ = s.Tell(ctx, m)
			}
		default:
			m := &pb.FindResponse{}
			if proto.Unmarshal(b, m) != nil {
				return
			}
			if a, err := decodeAnswer(m, q); err == nil && a.Action != threshold.Miss && a.Entry.Tenant != q.Tenant {
				t.Errorf("the answer of %q", a.Entry.Tenant)
			}
		}
		(&place1{t: t, shard: c.shard}).sound()
	})
}
