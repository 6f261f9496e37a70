package hnsw

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"headgate/cache/hnsw"
)

// part is one thing that is measured.
type part struct {
	name string
	run  func(context.Context, *Config, *data, string, *Report) error
}

func parts() []part {
	return []part{{"peer", peer}, {"deletes", deletes}, {"readers", readers}, {"few", few}}
}

func (c *Config) index(d *data, int8s bool) hnsw.Config {
	return hnsw.Config{Dim: d.dim, M: c.M, EfConstruction: c.EfConstruction, Seed: 100, MaxLen: d.len(), Crossover: -1, Int8: int8s}
}

// build inserts all vectors.
func build(d *data, c hnsw.Config) (x *hnsw.Index, cpu time.Duration, err error) {
	runtime.GC()
	began := processCPU()
	x = hnsw.New(c)
	for i := range d.len() {
		if err := x.Insert(uint64(i), d.vector(i)); err != nil {
			return nil, 0, err
		}
	}
	return x, processCPU() - began, nil
}

// search asks all queries in one thread, and sets found to what was found.
func search(d *data, x *hnsw.Index, ef int, found []uint32) (cpu time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var got []hnsw.Neighbor
	began := threadCPU()
	for i := range d.queries() {
		got = x.Search(got[:0], d.asked(i), k, ef, nil)
		for j, n := range got {
			found[i*k+j] = uint32(n.ID)
		}
	}
	return (threadCPU() - began) / time.Duration(d.queries())
}

// peer measures beside hnswlib.
func peer(ctx context.Context, c *Config, d *data, dir string, rep *Report) error {
	p := &rep.peer
	binary, err := compileYardstick(ctx, dir)
	if errors.Is(err, errNoYardstick) {
		p.missing = err.Error()
		return nil
	}
	if err != nil {
		return err
	}
	var y *yardstick
	var plain, small *hnsw.Index
	for range c.Builds {
		if y != nil {
			if err := y.stop(); err != nil {
				return err
			}
		}
		if y, err = startYardstick(ctx, binary, d, c); err != nil {
			return err
		}
		var cpu, cpu8 time.Duration
		if plain, cpu, err = build(d, c.index(d, false)); err == nil {
			small, cpu8, err = build(d, c.index(d, true))
		}
		if err != nil {
			return errors.Join(err, y.stop())
		}
		p.builds = append(p.builds, [3]time.Duration{y.build, cpu, cpu8})
	}
	p.bytes = [3]int64{y.bytes, plain.Bytes(), small.Bytes()}
	p.raw = int64(4 * len(d.base))
	err = p.search(c, d, y, plain, small)
	return errors.Join(err, y.stop())
}

// search goes round by round through all ef, with one after the other.
func (p *peers) search(c *Config, d *data, y *yardstick, plain, small *hnsw.Index) error {
	for _, ef := range [...]int{10, 16, 32, 64, 128, 256, 512} {
		p.searches = append(p.searches, searched{ef: ef})
	}
	found := make([]uint32, d.queries()*k)
	for range c.Rounds {
		for i := range p.searches {
			s := &p.searches[i]
			cpu, err := y.search(s.ef)
			if err != nil {
				return err
			}
			s.cpu[0] = append(s.cpu[0], cpu)
			s.ten[0], s.one[0] = d.recall(y.found)
			for j, x := range [...]*hnsw.Index{plain, small} {
				s.cpu[j+1] = append(s.cpu[j+1], search(d, x, s.ef, found))
				s.ten[j+1], s.one[j+1] = d.recall(found)
			}
		}
	}
	return nil
}

// deletes measures what is found when three of ten vectors are gone, and when others have come for them.
func deletes(ctx context.Context, c *Config, d *data, _ string, rep *Report) error {
	const ef = 64
	rest := &data{dim: d.dim, query: d.query, base: d.base}
	x, _, err := build(d, c.index(d, false))
	if err != nil {
		return err
	}
	found := make([]uint32, d.queries()*k)
	note := func(what string, truth *data, cpu time.Duration, writes int) {
		search := search(d, x, ef, found)
		row := deleted{what: what, search: search, stats: x.Stats()}
		row.ten, row.one = truth.recall(found)
		if writes > 0 {
			row.write = cpu / time.Duration(writes)
		}
		rep.deletes = append(rep.deletes, row)
	}
	note("all", d, 0, 0)
	random := rand.New(rand.NewPCG(3, 3))
	gone := random.Perm(d.len())[:d.len()*3/10]
	isGone := make([]bool, d.len())
	began := processCPU()
	for _, id := range gone {
		x.Delete(uint64(id))
		isGone[id] = true
	}
	cpu := processCPU() - began
	rest.nearestOf(func(id int) bool { return !isGone[id] })
	note("30 % deleted", rest, cpu, len(gone))
	began = processCPU()
	if err := x.Rebuild(ctx); err != nil {
		return err
	}
	note("rebuilt", rest, processCPU()-began, d.len()-len(gone))
	began = processCPU()
	for _, id := range gone {
		if err := x.Insert(uint64(id), d.vector(id)); err != nil {
			return err
		}
	}
	note("inserted again", d, processCPU()-began, len(gone))
	for range 2 { // everything once
		for id := range d.len() {
			x.Delete(uint64(id))
			if err := x.Insert(uint64(id), d.vector(id)); err != nil {
				return err
			}
		}
	}
	note("all replaced twice", d, 0, 0)
	return ctx.Err()
}

// readers measures searches of many goroutines, alone and beside one that writes.
func readers(ctx context.Context, c *Config, d *data, _ string, rep *Report) error {
	x, _, err := build(d, c.index(d, false))
	if err != nil {
		return err
	}
	for n := 1; ; n = min(2*n, runtime.GOMAXPROCS(0)) {
		row := readerRow{readers: n}
		for range c.Rounds {
			for i := range row.did {
				row.did[i] = append(row.did[i], crowd(ctx, d, x, n, i == 1))
			}
		}
		rep.readers = append(rep.readers, row)
		if n >= runtime.GOMAXPROCS(0) {
			return ctx.Err()
		}
	}
}

// crowd lets n goroutines search for a while, and one more replace vectors.
func crowd(ctx context.Context, d *data, x *hnsw.Index, n int, write bool) (did crowded) {
	const length, ef = time.Second, 64
	ctx, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	var searches, writes, cpu atomic.Int64
	var all sync.WaitGroup
	for r := range n {
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			began := threadCPU()
			var got []hnsw.Neighbor
			for i := r * 37; ctx.Err() == nil; i++ {
				got = x.Search(got[:0], d.asked(i%d.queries()), k, ef, nil)
				searches.Add(1)
			}
			cpu.Add(int64(threadCPU() - began))
		})
	}
	if write {
		all.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				id := i * 31 % d.len()
				if x.Delete(uint64(id)) && x.Insert(uint64(id), d.vector(id)) == nil {
					writes.Add(1)
				}
			}
		})
	}
	began := time.Now()
	all.Wait()
	took := time.Since(began).Seconds()
	return crowded{
		searches: float64(searches.Load()) / took,
		writes:   float64(writes.Load()) / took,
		cpu:      float64(cpu.Load()) / 1e3 / float64(max(searches.Load(), 1)),
	}
}

// few measures where a graph begins to be faster than a look at all.
func few(ctx context.Context, c *Config, d *data, _ string, rep *Report) error {
	const ef = 64
	rep.crossover = hnsw.Crossover(d.dim, time.Now)
	found := make([]uint32, d.queries()*k)
	for _, n := range [...]int{250, 500, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 10_000} {
		if n > d.len() {
			break
		}
		part := &data{dim: d.dim, query: d.query, base: d.base[:n*d.dim]}
		row := fewRow{n: n}
		for i, crossover := range [...]int{1 << 20, -1} {
			config := c.index(part, false)
			config.Crossover = crossover
			x, _, err := build(part, config)
			if err != nil {
				return err
			}
			for range c.Rounds {
				row.cpu[i] = append(row.cpu[i], search(part, x, ef, found))
			}
		}
		rep.few = append(rep.few, row)
	}
	return ctx.Err()
}
