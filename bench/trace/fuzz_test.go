package trace

import (
	"bytes"
	"testing"
	"time"
)

// FuzzRead: whatever a file holds, it is an error or a trace that can be written, read again and replayed.
func FuzzRead(f *testing.F) {
	f.Add([]byte("time,tenant,input_tokens,output_tokens\n0,a,1,2\n1.5,\"b\"\"\",3,4\n"))
	f.Add([]byte("\ufefftime,input_tokens,output_tokens\n2026-01-15T08:00:00Z,1,2\n2026-01-15T08:00:01Z,3,4\n"))
	f.Add([]byte("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"))
	f.Add([]byte(`{"timestamp":0,"input_length":6,"output_length":5,"hash_ids":[0,1]}` + "\n" + `{"timestamp":9,"input_length":6,"output_length":5,"hash_ids":[0]}`))
	f.Add([]byte("time,started,request_id,tenant,input_tokens,output_tokens,outcome\r\n2026-01-15T08:00:09Z,,r,'=b,20,2,ok\r\n2026-01-15T08:00:08Z,,r,a,20,2,ok\r\n,,,,0,0,lost\r\n"))
	f.Add([]byte(`{"time":"2026-01-15T08:00:09Z","request_id":"r","tenant":"b","input_tokens":1,"output_tokens":2}`))
	f.Add([]byte("\x1f\x8b\x08\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		tr, err := Read(bytes.NewReader(b), "", Options{Name: "x"})
		if err != nil {
			return
		}
		var first, again bytes.Buffer
		if err := tr.Write(&first); err != nil {
			t.Fatal(err)
		}
		if tr.Span() > 90*24*time.Hour { // where a second written as a float still has its nanoseconds
			return
		}
		back, err := Read(bytes.NewReader(first.Bytes()), CSV, Options{Name: "x"})
		if err != nil {
			t.Fatalf("%v in %q", err, first.Bytes())
		}
		if err := back.Write(&again); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(first.Bytes(), again.Bytes()) {
			t.Fatalf("%q was read as %q", first.Bytes(), again.Bytes())
		}
		cells, err := tr.Cells(Config{Headroom: []float64{1}})
		if err != nil {
			return
		}
		for _, a := range cells[0].Demand() {
			if a.At >= int64(cells[0].For) || a.Cost > cells[0].Limit.Burst {
				t.Fatalf("%+v in %+v", a, &cells[0])
			}
		}
	})
}
