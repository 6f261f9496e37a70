package cache

import (
	"bytes"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	pb "headgate/cache/cachepb"
)

// TestWireKeeps: what is encoded is decoded as it was; chunks of a stream may come in fewer.
func TestWireKeeps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := Key(rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "key"))
		entry := func() *Entry {
			d := func(name string) time.Duration {
				return time.Duration(rapid.Int64Min(0).Draw(t, name))
			}
			return &Entry{
				Key: k, Tenant: rapid.String().Draw(t, "tenant"), Surface: "s", ContentType: "c",
				Body: bytes.Repeat([]byte{7}, rapid.SampledFrom([]int{0, 1, pieceBytes - 1, pieceBytes, pieceBytes + 1, 3*pieceBytes + 5}).Draw(t, "size")),
				Tags: rapid.SliceOfN(rapid.String(), 1, 3).Draw(t, "tags"), Stamp: 3, Input: 1, CachedInput: 2, Output: 3,
				Life: Life{TTL: d("ttl"), MaxTTL: d("max"), Stale: d("stale"), StaleIfError: d("error"), Beta: 1.5}, Delta: d("delta"), Age: d("age"),
			}
		}
		ups := []*up{
			{kind: upAsk, ask: &asked{key: k, refresh: true, early: true, age: 1, leadFor: 2, leads: []uint64{1, 1 << 63}}, waits: true},
			{kind: upBeat},
			{kind: upWants, live: true},
			{kind: upBegin, token: 9, contentType: "text/event-stream"},
			{kind: upBegin, token: 9, about: &Entry{Key: k, Tenant: "acme", Tags: []string{"doc"}, Stamp: 4}},
			{kind: upAbandon, token: 9, unasked: true},
			{kind: upAbandon, token: 9, invalid: true},
			{kind: upStore, token: 9, entry: entry()},
			{kind: upShare, token: 9, entry: entry()},
			{kind: upUnshareable, token: 9, cut: true},
			{kind: upFailed, token: 9, failure: Failure{500, "c", []byte("b")}},
			{kind: upAbandon, token: 9, counts: true},
			{kind: upBroken, token: 9},
			{kind: upData, token: 9, data: []byte("x")},
		}
		var up upDecoder
		up.max = maxEntry
		for _, m := range encodeUps(ups) {
			u, err := up.next(m)
			if err != nil {
				t.Fatal(err)
			}
			if u != nil {
				same(t, u, ups[0])
				ups = ups[1:]
			}
		}
		e := entry()
		downs := []*down{
			{kind: downBeat},
			{kind: downLead, token: 9, hit: Hit{Entry: e, Age: e.Age, Stale: true}},
			{kind: downLead, token: 9},
			{kind: downOthers, token: 9, others: true},
			{kind: downBegin, token: 9, contentType: "c"},
			{kind: downBegin, token: 9, about: &Entry{Key: k, Tenant: "acme", Tags: []string{"doc"}, Stamp: 4}},
			{kind: downData, token: 9, data: []byte("x")},
			{kind: downEnd, token: 9, whole: true},
			{kind: downHit, hit: Hit{Entry: e, Age: e.Age, Stale: true, Refresh: true}, stored: true, keep: true},
			{kind: downFailed, failure: Failure{500, "c", []byte("b")}, hit: Hit{Entry: e, Age: e.Age}},
			{kind: downPass},
			{kind: downBusy},
			{kind: downAgain},
		}
		var down downDecoder
		down.max = maxEntry
		for _, m := range encodeDowns(downs) {
			d, err := down.next(m)
			if err != nil {
				t.Fatal(err)
			}
			if d != nil {
				same(t, d, downs[0])
				downs = downs[1:]
			}
		}
		hits := []Hit{{Entry: e, Age: e.Age, Stale: true, Tier: Owner}, {Entry: e, Age: e.Age, Tier: Owner}}
		var piece pieceDecoder
		piece.max = maxEntry
		for i := range hits {
			var got []Hit
			for _, m := range encodePieces(&hits[i], i+7) {
				h, index, err := piece.next(m)
				if err != nil || h.Entry != nil && index != i+7 {
					t.Fatal(index, err)
				}
				if h.Entry != nil {
					got = append(got, h)
				}
			}
			same(t, got, hits[i:i+1])
		}
		if len(ups)+len(downs) > 0 {
			t.Fatalf("%d and %d messages were lost", len(ups), len(downs))
		}
	})
}

func same(t *rapid.T, got, want any) {
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v, want %+v", got, want)
	}
}

// TestChunksGoTogether, those of one stream, to a bound.
func TestChunksGoTogether(t *testing.T) {
	var ups []*up
	var downs []*down
	for i := range 4000 {
		token := uint64(i / 1000)
		ups = append(ups, &up{kind: upData, token: token, data: bytes.Repeat([]byte{byte(i)}, 100)})
		downs = append(downs, &down{kind: downData, token: token, data: ups[i].data})
	}
	var up, down []byte
	for _, m := range encodeUps(ups) {
		up = append(up, m.GetData()...)
		if len(m.GetData()) > batchBytes {
			t.Errorf("%d bytes", len(m.GetData()))
		}
	}
	for _, m := range encodeDowns(downs) {
		down = append(down, m.GetData()...)
	}
	for i, u := range ups {
		if !bytes.Equal(up[i*100:(i+1)*100], u.data) || !bytes.Equal(down[i*100:(i+1)*100], u.data) || len(u.data) != 100 {
			t.Fatalf("chunk %d is another", i)
		}
	}
	if got := len(encodeUps(ups)); got != 8 {
		t.Errorf("%d messages", got)
	}
}

// FuzzPeer: whatever other nodes send, decoders keep to their bounds.
func FuzzPeer(f *testing.F) {
	k := fillKey("q")
	e := answerFor(k)
	e.Key = k
	for _, m := range encodeUps([]*up{{kind: upAsk, ask: &asked{key: k}}, {kind: upStore, entry: e}, {kind: upFailed, failure: Failure{Status: 1}}}) {
		b, _ := proto.Marshal(m)
		f.Add(b, b, uint8(0))
	}
	for _, m := range encodeDowns([]*down{{kind: downHit, hit: Hit{Entry: e}}, {kind: downPass}}) {
		b, _ := proto.Marshal(m)
		f.Add(b, b, uint8(1))
	}
	b, _ := proto.Marshal(&pb.Up{Kind: pb.Up_STORE, Entry: encodeEntry(e, 0), Rest: 5})
	more, _ := proto.Marshal(&pb.Up{Kind: pb.Up_MORE, Data: []byte("12345")})
	f.Add(b, more, uint8(0))
	f.Add(b, more, uint8(2))
	const most = 1000
	f.Fuzz(func(t *testing.T, one, two []byte, which uint8) {
		up, down, piece := upDecoder{joiner: joiner{max: most}}, downDecoder{joiner: joiner{max: most}}, pieceDecoder{joiner: joiner{max: most}}
		for _, b := range [][]byte{one, two} {
			var e *Entry
			var err error
			switch which % 3 {
			case 0:
				var m pb.Up
				if proto.Unmarshal(b, &m) != nil {
					return
				}
				u, failed := up.next(&m)
				if err = failed; u != nil {
					e = u.entry
				}
			case 1:
				var m pb.Down
				if proto.Unmarshal(b, &m) != nil {
					return
				}
				d, failed := down.next(&m)
				if err = failed; d != nil {
					e = d.hit.Entry
				}
			case 2:
				var m pb.Piece
				if proto.Unmarshal(b, &m) != nil {
					return
				}
				h, _, failed := piece.next(&m)
				e, err = h.Entry, failed
			}
			if err != nil {
				return
			}
			if e != nil && (len(e.Body) > most || len(e.Tags) > maxTags || e.Age < 0 || e.Life.TTL < 0) {
				t.Fatalf("%+v", e)
			}
		}
	})
}
