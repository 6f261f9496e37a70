package semantic

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"headgate/cache"
	"headgate/cache/cachepb"
	"headgate/cache/guard"
	"headgate/cache/hnsw"
	pb "headgate/cache/semantic/semanticpb"
	"headgate/cache/threshold"
	"headgate/cache/vec"
)

// Bounds of what is asked and kept.
const (
	maxBody    = 1 << 20 // bytes of an answer
	maxText    = guard.MaxBytes
	maxName    = 4096 // bytes of a tenant, a surface, an embedder, a tag
	maxTags    = 1024
	maxReasons = 64
	maxWhy     = 200
	maxObs     = 16 << 10
	maxTold    = 1024 // sketches in one message
)

// unitOff is by how much the square of a vector's length may differ from 1.
const unitOff = 1e-3

// checkVector refuses what is no unit vector of a model.
func checkVector(name string, v []float32) error {
	if len(v) == 0 || len(v) > hnsw.MaxDim {
		return fmt.Errorf("%s: %d dimensions, of 1 to %d", name, len(v), hnsw.MaxDim)
	}
	if n := vec.Dot(v, v); !(n > 1-unitOff && n < 1+unitOff) { // so that NaN is none, either
		return fmt.Errorf("%s: the square of its length is %v: must be 1", name, n)
	}
	return nil
}

// checkText refuses what guards would not read.
func checkText(s string) error {
	if s == "" || len(s) > maxText {
		return fmt.Errorf("text: %d bytes, of 1 to %d", len(s), maxText)
	}
	return nil
}

func (p *place) check() error {
	for _, f := range [...]struct{ name, value string }{{"tenant", p.tenant}, {"surface", p.surface}, {"embedder", p.embedder}} {
		if len(f.value) > maxName {
			return fmt.Errorf("%s: %d bytes, of at most %d", f.name, len(f.value), maxName)
		}
	}
	return nil
}

func (q *Question) place() place {
	return place{q.Partition, q.Tenant, q.Surface, q.Embedder}
}

// check refuses a question that cannot be compared.
func (q *Question) check() error {
	p := q.place()
	if err := errors.Join(p.check(), checkText(q.Text), checkVector("vector", q.Vector), q.Policy.Validate()); err != nil {
		return err
	}
	if math.IsNaN(q.Least) || len(q.Tags) > maxTags {
		return errors.New("the least similarity is no number, or there are too many tags")
	}
	return nil
}

// formatID is an entry's id as clients see it; "" for none.
func formatID(id uint64) string {
	if id == 0 {
		return ""
	}
	return fmt.Sprintf("%016x", id)
}

func parseID(s string) (uint64, error) {
	id, err := strconv.ParseUint(s, 16, 64)
	if err != nil || len(s) != 16 || id == 0 {
		return 0, ErrID
	}
	return id, nil
}

func (p *place) encode() *pb.Place {
	return &pb.Place{Partition: p.key[:], Tenant: []byte(p.tenant), Surface: []byte(p.surface), Embedder: []byte(p.embedder)}
}

func decodePlace(m *pb.Place) (p place, err error) {
	if copy(p.key[:], m.GetPartition()) != len(m.GetPartition()) || len(m.GetPartition()) != len(p.key) {
		return p, fmt.Errorf("partition: %d bytes, not %d", len(m.GetPartition()), len(p.key))
	}
	p.tenant, p.surface, p.embedder = string(m.GetTenant()), string(m.GetSurface()), string(m.GetEmbedder())
	return p, p.check()
}

func encodePolicy(p *threshold.Policy) *pb.Policy {
	return &pb.Policy{Mode: uint32(p.Mode), Threshold: p.Threshold, ErrorBound: p.ErrorBound, HitErrorBound: p.HitErrorBound, Audit: p.Audit}
}

func decodePolicy(m *pb.Policy) (threshold.Policy, error) {
	p := threshold.Policy{
		Mode: threshold.Mode(min(m.GetMode(), math.MaxUint8)), Threshold: m.GetThreshold(), ErrorBound: m.GetErrorBound(), HitErrorBound: m.GetHitErrorBound(),
		Audit: m.GetAudit(),
	}
	return p, p.Validate()
}

// encodeTags is of names that need not be UTF-8.
func encodeTags(tags []string) (out [][]byte) {
	for _, t := range tags {
		out = append(out, []byte(t))
	}
	return out
}

func encodeQuestion(q *Question) *pb.FindRequest {
	p := q.place()
	return &pb.FindRequest{
		Place: p.encode(), Text: []byte(q.Text), Vector: q.Vector, Policy: encodePolicy(&q.Policy), Least: q.Least, Tags: encodeTags(q.Tags),
		Verify: q.Verify, Only: q.Only,
	}
}

// decodeQuestion refuses what no node would send.
func decodeQuestion(m *pb.FindRequest) (*Question, error) {
	p, err := decodePlace(m.GetPlace())
	if err != nil {
		return nil, err
	}
	pol, err := decodePolicy(m.GetPolicy())
	if err != nil {
		return nil, err
	}
	q := &Question{
		Partition: p.key, Tenant: p.tenant, Surface: p.surface, Embedder: p.embedder, Text: string(m.GetText()), Vector: m.GetVector(), Policy: pol,
		Least: m.GetLeast(), Verify: m.GetVerify(), Only: m.GetOnly(),
	}
	for _, t := range m.GetTags() {
		q.Tags = append(q.Tags, string(t[:min(len(t), maxName+1)]))
	}
	return q, q.check()
}

func encodeAnswer(a *Answer) *pb.FindResponse {
	m := &pb.FindResponse{
		Action: uint32(a.Action), Shadow: a.Shadow, Id: a.id, Text: []byte(a.CachedText), Similarity: a.Similarity, Threshold: a.Threshold, Tau: a.Tau,
		Confidence: a.Confidence, Cell: uint32(a.cell), Borderline: a.Borderline, Why: []byte(a.Why),
		Uncounted: a.pending, Unaudited: a.unaudited,
	}
	for _, r := range a.Refused[:min(len(a.Refused), maxReasons)] {
		m.Refused = append(m.Refused, &pb.Reason{Kind: []byte(r.Kind), A: []byte(r.A), B: []byte(r.B)})
	}
	if a.Entry != nil {
		m.Entry = cache.EncodeEntry(a.Entry, a.Age)
	}
	return m
}

// decodeAnswer refuses what is no answer to the question.
func decodeAnswer(m *pb.FindResponse, q *Question) (Answer, error) {
	a := Answer{
		Action: threshold.Action(min(m.GetAction(), math.MaxUint8)), Shadow: m.GetShadow(), id: m.GetId(), EntryID: formatID(m.GetId()),
		CachedText: string(m.GetText()), Similarity: m.GetSimilarity(), Threshold: m.GetThreshold(), Tau: m.GetTau(), Confidence: m.GetConfidence(),
		cell: threshold.Cell(m.GetCell()), Borderline: m.GetBorderline(), Why: string(m.GetWhy()),
		pending: m.GetUncounted(), unaudited: m.GetUnaudited(),
	}
	if a.Action > threshold.Serve || len(m.GetRefused()) > maxReasons || len(a.Why) > maxWhy || len(a.CachedText) > maxText {
		return Answer{}, errors.New("answer: an unknown action, or a text that is too long")
	}
	if a.pending && !(q.Verify && a.Borderline && a.Action == threshold.Serve) {
		return Answer{}, errors.New("answer: it is left uncounted, and nobody would count it")
	}
	for _, f := range [...]float64{a.Similarity, a.Threshold, a.Tau, a.Confidence} {
		if math.IsNaN(f) || math.IsInf(f, 0) {
			return Answer{}, errors.New("answer: a number that is not finite")
		}
	}
	for _, r := range m.GetRefused() {
		a.Refused = append(a.Refused, guard.Reason{Kind: guard.Kind(r.GetKind()), A: string(r.GetA()), B: string(r.GetB())})
	}
	if a.Action == threshold.Miss {
		return a, nil
	}
	entry, err := decodeEntry(m.GetEntry(), q.Tenant, q.Surface)
	if err != nil {
		return Answer{}, err
	}
	switch {
	case a.id == 0:
		return Answer{}, errors.New("answer: an entry without an id")
	case entry.Age > entry.Life.TTL:
		return Answer{}, fmt.Errorf("answer: it is %s old, and lives %s", entry.Age, entry.Life.TTL)
	case slices.ContainsFunc(q.Tags, func(tag string) bool { return !slices.Contains(entry.Tags, tag) }):
		return Answer{}, errors.New("answer: it lacks a tag that was asked for")
	}
	a.Entry, a.Age = entry, entry.Age
	return a, nil
}

// decodeEntry refuses an entry that no node would send, or another's.
func decodeEntry(m *cachepb.Entry, tenant, surface string) (*cache.Entry, error) {
	if m == nil {
		return nil, errors.New("entry: there is none")
	}
	e, err := cache.DecodeEntry(m)
	if err != nil {
		return nil, err
	}
	if e.Tenant != tenant || e.Surface != surface {
		return nil, errors.New("entry: it is of another tenant or surface")
	}
	if len(e.Body) > maxBody {
		return nil, fmt.Errorf("entry: a body of %d bytes, of at most %d", len(e.Body), maxBody)
	}
	return e, nil
}

func (l *lesson) encode(now int64) *pb.LearnRequest {
	m := &pb.LearnRequest{
		Place: l.place.encode(), Once: l.once, Policy: encodePolicy(&l.policy), Id: l.id, Similarity: l.similarity, Action: uint32(l.action), Cell: uint32(l.cell),
		Same: l.label.Same, Known: l.label.Known, Answer: l.label.AnswerHash, Meaning: l.label.AnswerVector, Answers: l.label.Answers,
		Text: []byte(l.text), Vector: l.vector, Settles: l.settles, Unaudited: l.unaudited,
	}
	if l.entry != nil {
		m.Entry = cache.EncodeEntry(l.entry, l.age(now))
	}
	return m
}

// decodeLesson refuses what no node would send.
func decodeLesson(m *pb.LearnRequest, now int64) (*lesson, error) {
	p, err := decodePlace(m.GetPlace())
	if err != nil {
		return nil, err
	}
	pol, err := decodePolicy(m.GetPolicy())
	if err != nil {
		return nil, err
	}
	l := &lesson{
		place: p, once: m.GetOnce(), policy: pol, id: m.GetId(), similarity: m.GetSimilarity(), action: threshold.Action(min(m.GetAction(), math.MaxUint8)),
		cell: threshold.Cell(m.GetCell()), text: string(m.GetText()), vector: m.GetVector(), came: now, settles: m.GetSettles(), unaudited: m.GetUnaudited(),
		label: Label{
			Same: m.GetSame(), Known: m.GetKnown(), AnswerHash: m.GetAnswer(), AnswerVector: m.GetMeaning(), Answers: m.GetAnswers(),
		},
	}
	if m.GetEntry() != nil {
		if l.entry, err = decodeEntry(m.GetEntry(), p.tenant, p.surface); err != nil {
			return nil, err
		}
	}
	return l, l.check()
}

// check refuses what cannot be learnt.
func (l *lesson) check() error {
	if l.action > threshold.Serve || !(l.similarity >= -1 && l.similarity <= 1) {
		return fmt.Errorf("label: action %d at similarity %v", l.action, l.similarity)
	}
	if l.settles && (l.id == 0 || l.entry != nil || l.action != threshold.Serve && l.action != threshold.Explore) {
		return fmt.Errorf("answer %x: action %d settles nothing", l.id, l.action)
	}
	if !(l.label.Answers >= 0 && l.label.Answers <= 1) {
		return fmt.Errorf("answers %v: from 0 to 1", l.label.Answers)
	}
	if len(l.label.AnswerVector) > 0 {
		if err := checkVector("meaning", l.label.AnswerVector); err != nil {
			return err
		}
	}
	if l.entry == nil {
		return nil
	}
	if len(l.entry.Body) > maxBody {
		return fmt.Errorf("entry: a body of %d bytes, of at most %d", len(l.entry.Body), maxBody)
	}
	return errors.Join(checkText(l.text), checkVector("vector", l.vector))
}

// age is of the answer that is to be kept.
func (l *lesson) age(now int64) time.Duration {
	return max(l.entry.Age, 0) + time.Duration(max(now-l.came, 0))
}

func (f *fresh) encode() *pb.Moved {
	m := &pb.Moved{
		Id: f.id, Text: []byte(f.text), Vector: f.vector, Entry: cache.EncodeEntry(f.entry, f.entry.Age), Answer: f.answer, Class: f.class,
		Meaning: make([]byte, len(f.meaning)), Observations: f.obs,
	}
	for i, x := range f.meaning {
		m.Meaning[i] = byte(x)
	}
	for _, c := range f.hits {
		m.Hits = append(m.Hits, uint32(c))
	}
	return m
}

// decodeMoved refuses what no node would send.
func decodeMoved(m *pb.Moved, p *place) (*fresh, error) {
	entry, err := decodeEntry(m.GetEntry(), p.tenant, p.surface)
	if err != nil {
		return nil, err
	}
	f := &fresh{id: m.GetId(), text: string(m.GetText()), vector: m.GetVector(), entry: entry, answer: m.GetAnswer(), class: m.GetClass(), obs: m.GetObservations()}
	if f.id == 0 || f.class == 0 || len(m.GetHits()) > keptHits || len(m.GetMeaning()) > hnsw.MaxDim || len(f.obs) > maxObs {
		return nil, errors.New("entry: it has no id, or too much of something")
	}
	for _, x := range m.GetMeaning() {
		f.meaning = append(f.meaning, int8(x))
	}
	for _, c := range m.GetHits() {
		f.hits = append(f.hits, threshold.Cell(c))
	}
	return f, errors.Join(checkText(f.text), checkVector("vector", f.vector))
}
