package threshold

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

func FuzzObservations(f *testing.F) {
	var o Observations
	o.Add(0.5, 17, true)
	o.Add(1, cells-1, false)
	seed, _ := o.AppendBinary(nil)
	f.Add(seed)
	f.Add([]byte{0, 0, 0xc0, 0x7f, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		var o Observations
		if o.UnmarshalBinary(b) != nil {
			if o.Len() != 0 {
				t.Fatal("refused, and taken")
			}
			return
		}
		if again, _ := o.AppendBinary(nil); !bytes.Equal(again, b) {
			t.Fatalf("%x came back as %x", b, again)
		}
		fit := o.Fit()
		if tau, alpha := fit.Tau(0.9, 0.01); !(tau <= 1) || !(alpha >= 0 && alpha < 1) {
			t.Fatalf("τ %g, α %g of %+v", tau, alpha, fit)
		}
	})
}

func FuzzSketch(f *testing.F) {
	p := NewPool()
	for i := range Cell(100) {
		p.Seen(i * 31)
		p.Add(i*31, i%3 > 0)
	}
	f.Add(p.Own())
	f.Add([]byte{sketchVersion})
	f.Add([]byte{sketchVersion, 1, 1, 1, 2})
	f.Fuzz(func(t *testing.T, b []byte) {
		p := NewPool()
		if p.Hear("peer", b) != nil {
			return
		}
		m := p.current(0.05, 1)
		for _, w := range m.weights {
			if w != w || w-w != 0 {
				t.Fatalf("weights %v", m.weights)
			}
		}
	})
}

func FuzzBudget(f *testing.F) {
	b := NewBudget(&Policy{HitErrorBound: 0.05, ErrorBound: 0.01})
	for i := range 300 {
		b.Count(Audit)
		b.Label(i%7 > 0)
	}
	f.Add(b.Own())
	f.Add(NewBudget(&Policy{}).Own())
	f.Fuzz(func(t *testing.T, told []byte) {
		b := NewBudget(&Policy{HitErrorBound: 0.05, ErrorBound: 0.01})
		if b.Hear("peer", told) != nil {
			if !b.Allowed() {
				t.Fatal("refused, and tripped")
			}
			return
		}
		if s := b.Snapshot(); !(s.PerHit.Lower >= 0 && s.PerHit.Upper <= 1 && s.PerHit.Lower <= s.PerHit.Upper) {
			t.Fatalf("%+v", s)
		}
		if err := NewBudget(&Policy{}).Hear("other", b.Own()); err != nil {
			t.Fatal(err)
		}
	})
}

// TestNonsenseIsNotHeard: peers are not believed what cannot be.
func TestNonsenseIsNotHeard(t *testing.T) {
	p, b := NewPool(), NewBudget(&Policy{HitErrorBound: 0.1, ErrorBound: 0.1})
	for _, told := range [][]byte{
		nil,
		{sketchVersion + 1},
		{sketchVersion, 1, 1, 1, 2},             // more right than labelled
		{sketchVersion, 5, 1, 1, 1, 5, 1, 1, 1}, // a cell twice
		{sketchVersion, 0xff, 0xff, 0x7f, 1, 1, 1},
		{sketchVersion, 1, 1, 1},
	} {
		if err := p.Hear("peer", told); err == nil {
			t.Errorf("a pool hears %x", told)
		}
	}
	zeros := make([]byte, 18)
	for _, told := range [][]byte{
		nil,
		{wordVersion, maxBlocks + 1},
		append([]byte{wordVersion, 0}, zeros[1:]...),
		append(append([]byte{wordVersion, 0}, zeros...), 0),
		append(append([]byte{wordVersion, 1}, zeros...), 1, 1, 1, 2, 0), // more wrong than audited
	} {
		if err := b.Hear("peer", told); err == nil {
			t.Errorf("a budget hears %x", told)
		}
	}
	if len(p.peers)+len(b.peers) > 0 {
		t.Error("it was refused, and kept")
	}
}

// TestSketchesAreBounded: the greatest that a node can have told fits into what others read.
func TestSketchesAreBounded(t *testing.T) {
	p := NewPool()
	rng := rand.New(rand.NewPCG(1, 1))
	for c := range cells {
		p.own[c] = count{seen: 1 << 31, labelled: uint32(rng.IntN(maxLabels)), same: 0}
	}
	if n := len(p.Own()); n > MaxSketch {
		t.Errorf("a sketch of %d bytes, above %d", n, MaxSketch)
	}
	if err := NewPool().Hear("peer", p.Own()); err != nil {
		t.Error(err)
	}
	b := NewBudget(&Policy{HitErrorBound: 1, ErrorBound: 1})
	for range maxBlocks + 3 {
		b.count(&tally{maxCount / 32, maxCount / 32, maxCount / 32, maxCount / 32, maxCount / 32})
	}
	if err := NewBudget(&Policy{}).Hear("peer", b.Own()); err != nil {
		t.Error(err)
	}
}
