package threshold

import (
	"testing"

	"pgregory.net/rapid"
)

// TestAnswers: the count of an answer is never too great, and too small by a 65th part of all at most; 0 is no answer.
func TestAnswers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var a answers
		truth, all := map[uint64]int{}, 0
		for _, x := range rapid.SliceOfN(rapid.Uint64Range(0, 200), 0, 2000).Draw(t, "answers") {
			a.add(x)
			if x != 0 {
				truth[x]++
				all++
			}
		}
		if a.times(0) != 0 || len(a) > maxTold {
			t.Fatalf("%d times nothing, %d kept", a.times(0), len(a))
		}
		for x, n := range truth {
			if got := a.times(x); got > n || got < n-all/(maxTold+1) {
				t.Fatalf("answer %d: %d, not %d of %d", x, got, n, all)
			}
		}
	})
}

// TestOneAnswerTeachesLittle: whether it is named by its class or by its words, one answer gives a pool eight right labels, and
// a quarter of all once there are others; its wrong ones count.
func TestOneAnswerTeachesLittle(t *testing.T) {
	c := cellOf(0.9, 2)
	for _, name := range [][]uint64{{7}, {0, 7}} {
		p := NewPool()
		for range 1000 {
			p.Add(c, true, name...)
		}
		if n := p.own[c]; n != (count{0, leastTold, leastTold}) {
			t.Errorf("%v: a thousand times the same answer: %+v", name, n)
		}
		for i := range uint64(800) {
			p.Add(c, true, 1000+i)
		}
		for range 1000 {
			p.Add(c, true, name...)
		}
		if n := p.own[c]; n.labelled < 1060 || n.labelled > 1090 {
			t.Errorf("%v: with 800 others: %+v", name, n)
		}
		before := p.own[c].labelled - p.own[c].same
		p.Add(c, false, name...)
		if n := p.own[c]; n.labelled-n.same != before+1 {
			t.Errorf("%v: a wrong label is dropped: %+v", name, n)
		}
	}
	p := NewPool()
	for i := range 3 {
		if err := p.Hear(string(rune('a'+i)), NewPool().Own()); err != nil {
			t.Fatal(err)
		}
	}
	for range 1000 {
		p.Add(c, true, 7)
	}
	if n := p.own[c]; n.same != leastTold/4 {
		t.Errorf("one of four nodes: %+v", n)
	}
	p = NewPool()
	for range 100 {
		p.Add(c, true)
		p.Add(c, true, 0, 0)
	}
	if p.labels != 200 {
		t.Errorf("of answers without names %d labels count, not 200", p.labels)
	}
}

// TestDisowned: an answer that was given too often and is wrong since is served to nobody, and what is wrong with it is no
// longer held against the surface; right again, it is owned again. One that is wrong as often but not given too often is
// none of this, nor is what was found below the floor.
func TestDisowned(t *testing.T) {
	w := newWorld(3, smooth)
	policy := &Policy{Mode: Learned, HitErrorBound: 0.1, ErrorBound: 1}
	b, p := w.live(policy, 3000)
	const outage, other = 7, 8
	e := &Evidence{Similarity: 0.98, Answer: outage, Pool: p}
	c := cellOf(e.Similarity, vote(e))
	serves := func() bool { return policy.Decide(e, b, w.rng).Action == Serve }
	for range p.labels { // more than its share
		p.Add(c, true, outage)
	}
	if !serves() {
		t.Fatal("an answer that was always right is not served: the test shows nothing")
	}
	for range 20 {
		p.Add(cellOf(floor-0.1, 0), false, outage)
		p.Add(c, false, other)
	}
	if p.disowned(outage) || p.disowned(other) {
		t.Error("disowned for what was too far away, or for what was hardly ever given")
	}
	n := 0
	for ; !p.disowned(outage) && n < 100; n++ {
		p.Add(c, false, outage)
	}
	if n != 9 || serves() {
		t.Errorf("disowned after %d wrong ones, served: %t", n, serves())
	}
	before := p.own[c]
	if p.Add(c, false, outage); p.own[c] != before {
		t.Error("what is wrong with an answer that is disowned is held against the surface")
	}
	for range 8 {
		p.Add(c, true, outage)
	}
	if p.disowned(outage) {
		t.Error("right again, and still disowned")
	}
}

// TestRecordsAreBounded: of many answers that were given too often those that are disowned are remembered longest.
func TestRecordsAreBounded(t *testing.T) {
	var r records
	for range recordBits {
		r.add(1, false, true)
	}
	for a := range uint64(200) {
		r.add(100+a, true, true)
	}
	if len(r) != maxRecords || !r.disowned(1) || r.at(299) < 0 || r.at(100) >= 0 {
		t.Errorf("%d records: %+v", len(r), r)
	}
	for a := range uint64(2 * maxRecords) {
		for range recordBits {
			r.add(1000+a, false, true)
		}
	}
	if len(r) != maxRecords || r.disowned(1) || !r.disowned(1000+2*maxRecords-1) {
		t.Errorf("%d records: %+v", len(r), r)
	}
	if r.add(0, false, true); r.at(0) >= 0 {
		t.Error("no answer has a record")
	}
	if r.add(7, false, false); r.at(7) >= 0 {
		t.Error("an answer that is not given too often has a record")
	}
}
