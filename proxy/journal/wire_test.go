package journal

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	pb "headgate/proxy/journal/journalpb"
)

// anyText is text of any bytes, mostly short.
func anyText(t *rapid.T, label string) string {
	return string(rapid.SliceOfN(rapid.Byte(), 0, rapid.SampledFrom([]int{0, 3, 40, 200}).Draw(t, "most")).Draw(t, label))
}

func anyParts(t *rapid.T) []Part {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Part {
		return Part{Account: anyAccount(t), Amount: rapid.Int64().Draw(t, "amount")}
	}), 0, 4).Draw(t, "parts")
}

func anyAccount(t *rapid.T) Account {
	return Account{
		Tenant: anyText(t, "tenant"), Budget: anyText(t, "budget"), Subject: anyText(t, "subject"),
		Start: rapid.Int64().Draw(t, "start"), End: rapid.Int64().Draw(t, "end"),
	}
}

func anyTime(t *rapid.T) time.Time { return atNanos(rapid.Int64().Draw(t, "time")) }

func anyUsage(t *rapid.T) *Usage {
	n := func() int64 { return rapid.Int64().Draw(t, "n") }
	return &Usage{
		ID: rapid.Uint64().Draw(t, "id"), Incarnation: rapid.Uint64().Draw(t, "incarnation"), Time: anyTime(t), Started: anyTime(t),
		RequestID: anyText(t, "request"), Tenant: anyText(t, "tenant"), Key: anyText(t, "key"), User: anyText(t, "user"),
		Surface: anyText(t, "surface"), Model: anyText(t, "model"), Asked: anyText(t, "asked"), Backend: anyText(t, "backend"),
		Input: n(), CachedInput: n(), CacheWrite: n(), CacheWrite1h: n(), Output: n(), Images: n(), AudioSeconds: n(), Cost: n(), Reserved: n(),
		Tier: anyText(t, "tier"), Latency: time.Duration(n()), TTFT: time.Duration(n()), Status: int(rapid.Int32().Draw(t, "status")),
		Outcome: anyText(t, "outcome"), Stream: rapid.Bool().Draw(t, "stream"), Estimated: rapid.Bool().Draw(t, "estimated"), Parts: anyParts(t),
	}
}

func marshal(t *rapid.T, m proto.Message) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestWire holds the records written by hand to the generated code, byte for byte, and reads
// them back.
func TestWire(t *testing.T) {
	t.Run("usage", rapid.MakeCheck(func(t *rapid.T) {
		u := anyUsage(t)
		rec, from := begin(nil, recUsage)
		rec = end(putUsage(rec, u), from)
		want := marshal(t, &pb.Record{Kind: &pb.Record_Usage{Usage: toProto(u)}})
		if !bytes.Equal(rec, want) {
			t.Fatalf("wrote %x\nwant  %x", rec, want)
		}
		kind, message, err := parseRecord(rec)
		var back Usage
		if err == nil {
			err = names{}.usage(message, &back)
		}
		if back.Parts == nil && len(u.Parts) == 0 {
			back.Parts = u.Parts
		}
		if err != nil || kind != recUsage || !reflect.DeepEqual(&back, u) {
			t.Fatalf("read %+v, %v, want %+v", back, err, u)
		}
		var over Usage
		if fromProto(toProto(u), &over); !reflect.DeepEqual(over.Outcome, u.Outcome) || over.Latency != u.Latency || !over.Time.Equal(u.Time) {
			t.Fatalf("over the wire %+v, want %+v", over, u)
		}
	}))
	t.Run("reservation", rapid.MakeCheck(func(t *rapid.T) {
		r := &Reservation{
			ID: rapid.Uint64().Draw(t, "id"), Time: anyTime(t), RequestID: anyText(t, "request"), Tenant: anyText(t, "tenant"),
			Key: anyText(t, "key"), User: anyText(t, "user"), Model: anyText(t, "model"), InputTokens: rapid.Int64().Draw(t, "in"),
			OutputTokens: rapid.Int64().Draw(t, "out"), Cost: rapid.Int64().Draw(t, "cost"), Parts: anyParts(t),
		}
		rec, from := begin(nil, recReservation)
		rec = end(putReservation(rec, r), from)
		m := &pb.Reservation{
			Id: r.ID, Time: nanos(r.Time), RequestId: []byte(r.RequestID), Tenant: []byte(r.Tenant), Key: []byte(r.Key), User: []byte(r.User),
			Model: []byte(r.Model), InputTokens: r.InputTokens, OutputTokens: r.OutputTokens, Cost: r.Cost,
		}
		for i := range r.Parts {
			m.Parts = append(m.Parts, partToProto(&r.Parts[i]))
		}
		if want := marshal(t, &pb.Record{Kind: &pb.Record_Reservation{Reservation: m}}); !bytes.Equal(rec, want) {
			t.Fatalf("wrote %x\nwant  %x", rec, want)
		}
		var back Reservation
		if err := (&pending{payload: rec}).read(nil, &back); err != nil {
			t.Fatal(err)
		}
		if back.Parts == nil && len(r.Parts) == 0 {
			back.Parts = r.Parts
		}
		if !reflect.DeepEqual(&back, r) {
			t.Fatalf("read %+v, want %+v", back, r)
		}
	}))
	t.Run("head", rapid.MakeCheck(func(t *rapid.T) {
		h := head{
			version: uint64(rapid.Uint32().Draw(t, "version")), segment: rapid.Uint64().Draw(t, "segment"), incarnation: rapid.Uint64().Draw(t, "incarnation"),
			node: anyText(t, "node"), boot: anyText(t, "boot"), created: rapid.Int64().Draw(t, "created"), checkpoints: uint64(rapid.Uint32().Draw(t, "checkpoints")),
		}
		m := &pb.Head{Version: uint32(h.version), Segment: h.segment, Incarnation: h.incarnation, Node: []byte(h.node), Boot: []byte(h.boot), Created: h.created, Checkpoints: uint32(h.checkpoints)}
		if rapid.Bool().Draw(t, "before") {
			b := before{rapid.Uint64().Draw(t, "n"), rapid.Int64().Draw(t, "end"), rapid.Int64().Draw(t, "first"), rapid.Int64().Draw(t, "last")}
			h.before, m.Before = &b, &pb.Before{Segment: b.segment, End: b.end, First: b.first, Last: b.last}
		}
		rec := putHead(nil, &h)
		if want := marshal(t, m); !bytes.Equal(rec, want) {
			t.Fatalf("wrote %x\nwant  %x", rec, want)
		}
		if back, err := parseHead(rec); err != nil || !reflect.DeepEqual(back, h) {
			t.Fatalf("read %+v, %v, want %+v", back, err, h)
		}
	}))
	t.Run("checkpoint", rapid.MakeCheck(checkCheckpoint))
}

// checkCheckpoint writes a book as its records, which the generated code can read, and loads
// it again.
func checkCheckpoint(t *rapid.T) {
	b := newBook(rapid.Uint64Range(1, math.MaxUint64).Draw(t, "incarnation"), anyText(t, "node"), anyText(t, "boot"))
	b.damaged, b.stopped, b.closed = anyText(t, "damaged"), rapid.Bool().Draw(t, "stopped"), rapid.Bool().Draw(t, "closed")
	b.forgotten = rapid.Int64().Draw(t, "forgotten")
	for range rapid.IntRange(0, 200).Draw(t, "accounts") {
		a := anyAccount(t)
		*b.total(&a) = total{rapid.Int64().Draw(t, "settled"), rapid.Int64().Draw(t, "crashed"), rapid.Int64().Draw(t, "lost")}
	}
	for id := range uint64(rapid.IntRange(0, 5).Draw(t, "open")) {
		rec, from := begin(nil, recReservation)
		rec = end(putReservation(rec, &Reservation{ID: id + 1, Parts: anyParts(t)}), from)
		if err := b.reserve(rec, 7); err != nil {
			t.Fatal(err)
		}
	}
	var back books
	for _, rec := range b.checkpoint() {
		if len(rec) > maxPayload {
			t.Fatalf("a record of %d bytes", len(rec))
		}
		var m pb.Record
		if err := proto.Unmarshal(rec, &m); err != nil || m.GetCheckpoint().GetIncarnation() != b.incarnation || m.GetCheckpoint().GetForgotten() != b.forgotten {
			t.Fatalf("the generated code reads %v, %v", &m, err)
		}
		_, message, err := parseRecord(rec)
		if err == nil {
			back, err = back.load(message, 7)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(back) != 1 || !reflect.DeepEqual(back[0], b) {
		t.Fatalf("loaded %+v, want %+v", back, b)
	}
}

// TestLongestRecords: what the bounds allow fits into a frame, and into a checkpoint.
func TestLongestRecords(t *testing.T) {
	long := string(bytes.Repeat([]byte("x"), MaxAccountName))
	r := &Reservation{ID: math.MaxUint64, RequestID: long, Tenant: long, Key: long, User: long, Model: long, Cost: math.MinInt64}
	for range MaxParts {
		r.Parts = append(r.Parts, Part{Account{long, long, long, math.MinInt64, math.MinInt64}, math.MaxInt64})
	}
	if err := checkParts(r.Parts); err != nil {
		t.Fatal(err)
	}
	rec, from := begin(nil, recReservation)
	rec = end(putReservation(rec, r), from)
	if n := len(rec) + partBytes + 1<<10; n > maxPayload {
		t.Fatalf("the longest checkpoint has %d bytes, a frame takes %d", n, maxPayload)
	}
}

func TestClip(t *testing.T) {
	for _, s := range []string{"", "short", string(bytes.Repeat([]byte("é"), 200)), string(bytes.Repeat([]byte{0x80}, 400)), "x" + string(bytes.Repeat([]byte("日"), 200))} {
		got := clip(s)
		if len(got) > MaxName || len(s) <= MaxName && got != s || utf8.ValidString(s) && !utf8.ValidString(got) || len(s) > MaxName && len(got) < MaxName-utf8.UTFMax {
			t.Errorf("clip(%d bytes) = %d bytes, %q", len(s), len(got), got)
		}
	}
}

// FuzzRecord: no bytes upset what reads records, and the generated code agrees on what is
// well-formed as far as we use it.
func FuzzRecord(f *testing.F) {
	for _, seed := range [][]byte{nil, {0x1a, 0}, {0x22, 2, 0x08, 1}, {0x32, 0}, {0x0a, 0x80}, {0x12, 3, 0x09, 1, 2}} {
		f.Add(seed)
	}
	rec, from := begin(nil, recUsage)
	f.Add(end(putUsage(rec, benchUsage()), from))
	rec, from = begin(nil, recReservation)
	f.Add(end(putReservation(rec, benchReservation()), from))
	b := newBook(1, "a", "b")
	b.total(&Account{Tenant: "t"}).settled = 3
	f.Add(b.checkpoint()[0])
	f.Fuzz(func(t *testing.T, payload []byte) {
		r := recovered{}
		own := newBook(1, "a", "b")
		r.books = append(r.books, own)
		_ = r.enter(&segment{origin: origin{1, 1}}, own, payload, &Usage{})
		kind, message, err := parseRecord(payload)
		if err != nil {
			return
		}
		_, _ = parseHead(message)
		if bs, err := (books{}).load(message, 1); err == nil && kind == recCheckpoint {
			for _, p := range bs[0].checkpoint() {
				if _, again, err := parseRecord(p); err != nil || len(again) == 0 {
					t.Fatalf("a checkpoint that was loaded cannot be written: %v", err)
				}
			}
		}
		var u Usage
		if kind != recUsage || names(nil).usage(message, &u) != nil {
			return
		}
		var m pb.Usage
		// Where a field has another type than ours, it passes it over.
		if proto.Unmarshal(message, &m) == nil && len(m.ProtoReflect().GetUnknown()) == 0 && (m.GetCost() != u.Cost || m.GetId() != u.ID || string(m.GetTenant()) != u.Tenant) {
			t.Fatalf("read %+v, the generated code %v", u, &m)
		}
	})
}

// FuzzScanner: frames are found behind any rubbish, and none in it.
func FuzzScanner(f *testing.F) {
	o := origin{3, 9}
	f.Add([]byte("rubbish"), []byte("payload"))
	f.Add([]byte(mark), []byte(mark))
	f.Add(o.appendFrame(nil, 1, []byte("elsewhere")), []byte{})
	f.Add(o.appendFrame(nil, 0, []byte("one")), []byte("two"))
	f.Add((origin{3, 8}).appendFrame(nil, 0, []byte("another process")), []byte("two"))
	f.Fuzz(func(t *testing.T, rubbish, payload []byte) {
		if len(payload) > maxPayload {
			return
		}
		text := o.appendFrame(bytes.Clone(rubbish), int64(len(rubbish)), payload)
		in, last, upTo := newScanner(bytes.NewReader(text), o, int64(len(text))), []byte(nil), int64(0)
		for n := 0; ; n++ {
			got, at, err := in.next()
			if n > len(text)+1 {
				t.Fatal("it does not end")
			}
			if bad := (*badStretch)(nil); err == nil {
				if at != upTo || !bytes.Equal(o.appendFrame(nil, at, got), text[at:in.at]) {
					t.Fatalf("a frame at %d that is none", at)
				}
				last, upTo = bytes.Clone(got), in.at
			} else if errors.As(err, &bad) {
				if bad.from != upTo || bad.to <= bad.from {
					t.Fatalf("a bad stretch of %d to %d after %d", bad.from, bad.to, upTo)
				}
				upTo = bad.to
			} else {
				break
			}
		}
		if upTo != int64(len(text)) || !bytes.Equal(last, payload) {
			t.Fatalf("it ends at %d of %d with %q, want %q", upTo, len(text), last, payload)
		}
	})
}
