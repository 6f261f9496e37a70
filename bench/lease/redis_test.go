package lease_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
)

// bucketScript is a token bucket as gateways keep it in Redis: a GCRA, one read and one write a
// decision, by Redis's clock. KEYS: the bucket. ARGV: µs a unit, the burst in µs, the cost.
const bucketScript = `
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local new = tat + ARGV[3] * ARGV[1]
if new - now > tonumber(ARGV[2]) then return {0, tat - now} end
redis.call('SET', KEYS[1], string.format('%.3f', new), 'PX', math.ceil((new - now) / 1000) + 1)
return {1, new - now}`

// redisServer is one on this machine that ends with the test.
type redisServer struct {
	address string
	process *os.Process
}

// startRedis starts Debian's Redis as it comes, but for what it would write to disk.
func startRedis(tb testing.TB) redisServer {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		tb.Skip("redis-server is not on this machine: apt-get install redis-server")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	if err := l.Close(); err != nil {
		tb.Fatal(err)
	}
	c := exec.Command(path, "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--dir", tb.TempDir())
	out, err := c.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := c.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait() // it was killed
	})
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "Ready to accept connections") {
			go func() {
				for lines.Scan() { // so that it never waits for a reader
				}
			}()
			return redisServer{"127.0.0.1:" + port, c.Process}
		}
	}
	tb.Fatal("redis-server ended before it was ready")
	return redisServer{}
}

// cpu is the processor time that a process has used; 0 for this one.
func cpu(tb testing.TB, process *os.Process) time.Duration {
	if process == nil {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			tb.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", process.Pid))
	if err != nil {
		tb.Skip("no /proc to read a process's time from")
	}
	_, after, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(after) // from the third field on
	var ticks int64
	for _, s := range f[11:13] { // user and system time
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			tb.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond // a hundredth of a second each on every Linux that Go runs on
}

// meter reports, beside ns/op, the processor time an operation took here and elsewhere, and the median
// of how long one took.
type meter struct {
	b       *testing.B
	server  *os.Process
	own     time.Duration
	servers time.Duration
	times   []time.Duration
}

func startMeter(b *testing.B, server *os.Process) *meter {
	m := &meter{b: b, server: server, own: cpu(b, nil)}
	if server != nil {
		m.servers = cpu(b, server)
	}
	b.ResetTimer()
	return m
}

func (m *meter) stop() {
	m.b.StopTimer()
	used := cpu(m.b, nil) - m.own
	if m.server != nil {
		used += cpu(m.b, m.server) - m.servers
	}
	m.b.ReportMetric(float64(used)/float64(m.b.N), "cpu-ns/op")
	m.b.ReportMetric(float64(m.b.N)/m.b.Elapsed().Seconds(), "op/s")
	if len(m.times) > 0 {
		slices.Sort(m.times)
		m.b.ReportMetric(float64(m.times[len(m.times)/2]), "p50-ns")
	}
}

// maxTimes bounds what a meter remembers.
const maxTimes = 1 << 20

// timed does one operation and notes how long it took.
func (m *meter) timed(do func()) {
	began := time.Now()
	do()
	if took := time.Since(began); len(m.times) < maxTimes {
		m.times = append(m.times, took)
	}
}

// BenchmarkRedis decides by a script in Redis on the same machine: one caller after the other, and as
// many at once as make it fastest (the client sends what waits in one go).
func BenchmarkRedis(b *testing.B) {
	server := startRedis(b)
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{server.address}, DisableCache: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(client.Close)
	script := rueidis.NewLuaScript(bucketScript)
	ks := keys(1000, 1)
	arguments := []string{"0.01", strconv.Itoa(burst / 100), "1"}
	decide := func(i int) {
		r, err := script.Exec(context.Background(), client, []string{ks[i%len(ks)].whole}, arguments).AsIntSlice()
		if err != nil || r[0] != 1 {
			b.Error("refused", r, err)
		}
	}
	decide(0) // loads the script
	b.Run("serial", func(b *testing.B) {
		m := startMeter(b, server.process)
		for i := range b.N {
			m.timed(func() { decide(i) })
		}
		m.stop()
	})
	for _, callers := range []int{16, 128} {
		b.Run(fmt.Sprintf("callers=%d", callers*2), func(b *testing.B) {
			b.SetParallelism(callers) // times the processors
			var seat atomic.Int64
			m := startMeter(b, server.process)
			b.RunParallel(func(pb *testing.PB) {
				for i := int(seat.Add(1)) * 7; pb.Next(); i++ {
					decide(i)
				}
			})
			m.stop()
		})
	}
}
