package clustertest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// pair opens a stream from a to b.
func pair(t *testing.T, n *Net) (near, far net.Conn) {
	t.Helper()
	l, err := n.Host("b").Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	near, err = n.Host("a").Dial(t.Context(), n.Host("b").Address(1))
	if err != nil {
		t.Fatal(err)
	}
	far, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return near, far
}

func TestDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		defer n.Close()
		a, b := n.Host("a"), n.Host("b")
		if _, err := a.Dial(t.Context(), b.Address(1)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("nobody listens: %v", err)
		}
		l, err := b.Listen(1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Listen(1); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("a port twice: %v", err)
		}
		n.Cut("a", "b")
		begin := time.Now()
		_, err = a.DialTimeout(b.Address(1), time.Second)
		if timeout := net.Error(nil); !errors.As(err, &timeout) || !timeout.Timeout() || time.Since(begin) != time.Second {
			t.Errorf("behind a cut: %v after %v", err, time.Since(begin))
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if _, err := a.Dial(ctx, b.Address(1)); !errors.Is(err, context.Canceled) {
			t.Errorf("canceled: %v", err)
		}
		time.AfterFunc(3*time.Second, n.Heal)
		if _, err := a.Dial(t.Context(), b.Address(1)); err != nil {
			t.Errorf("healed meanwhile: %v", err)
		}
		_ = l.Close()
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed: %v", err)
		}
		if _, err := a.Dial(t.Context(), b.Address(1)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("closed: %v", err)
		}
	})
}

func TestCutHoldsUpAStreamAndHealLetsItGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		defer n.Close()
		near, far := pair(t, n)
		n.Drop("a", "b")
		if _, err := near.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		_ = far.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := far.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read over a cut: %v", err)
		}
		if _, err := far.Write([]byte("y")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if _, err := near.Read(b); err != nil || b[0] != 'y' {
			t.Errorf("the other way is open: %q, %v", b, err)
		}
		_ = far.SetReadDeadline(time.Time{})
		time.AfterFunc(time.Minute, n.Heal)
		if _, err := far.Read(b); err != nil || b[0] != 'x' {
			t.Errorf("after the heal: %q, %v", b, err)
		}
	})
}

func TestDelayIsThatOfEachWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		defer n.Close()
		near, far := pair(t, n)
		n.Delay("a", "b", 30*time.Millisecond)
		begin := time.Now()
		_, _ = near.Write([]byte("x"))
		_ = near.Close()
		if b, err := io.ReadAll(far); err != nil || string(b) != "x" || time.Since(begin) != 30*time.Millisecond {
			t.Errorf("%q, %v after %v", b, err, time.Since(begin))
		}
	})
}

func TestFullBufferHoldsUpTheWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		defer n.Close()
		near, far := pair(t, n)
		_ = near.SetWriteDeadline(time.Now().Add(time.Second))
		if wrote, err := near.Write(make([]byte, maxInFlight+1)); wrote != maxInFlight || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%d, %v", wrote, err)
		}
		_ = near.SetWriteDeadline(time.Time{})
		go func() { _, _ = io.Copy(io.Discard, far) }()
		if wrote, err := near.Write(make([]byte, 3*maxInFlight)); wrote != 3*maxInFlight || err != nil {
			t.Errorf("%d, %v", wrote, err)
		}
	})
}

func TestCrashEndsStreamsAndRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		defer n.Close()
		near, far := pair(t, n)
		n.Host("b").Crash()
		if _, err := near.Read(make([]byte, 1)); err == nil {
			t.Error("read from the dead")
		}
		if _, err := near.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("wrote to the dead: %v", err)
		}
		if _, err := far.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("the dead read: %v", err)
		}
		if _, err := n.Host("b").Listen(1); err != nil {
			t.Errorf("no second life: %v", err)
		}
	})
}

func TestPacketsAreLostBehindACut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		defer n.Close()
		a, err := n.Host("a").Gossip(1)
		if err != nil {
			t.Fatal(err)
		}
		b, err := n.Host("b").Gossip(1)
		if err != nil {
			t.Fatal(err)
		}
		got := func() int {
			time.Sleep(time.Second)
			count := 0
			for len(b.PacketCh()) > 0 {
				<-b.PacketCh()
				count++
			}
			return count
		}
		send := func(count int) {
			for range count {
				if _, err := a.WriteTo([]byte("x"), n.Host("b").Address(1)); err != nil {
					t.Fatal(err)
				}
			}
		}
		n.Cut("a", "b")
		send(3)
		n.Heal()
		if c := got(); c != 0 {
			t.Errorf("%d came over a cut", c)
		}
		n.Delay("a", "b", 100*time.Millisecond)
		send(3)
		if c := got(); c != 3 {
			t.Errorf("%d of 3 came late", c)
		}
		n.Lose("a", "b", 0.5)
		send(1000)
		if c := got(); c < 400 || c > 600 {
			t.Errorf("%d of 1000 came over a link that loses half", c)
		}
		_ = b.Shutdown()
		send(1) // nobody takes it, nobody minds
	})
}

// TestStreamsKeepOrderAndContent writes and reads in random pieces under random faults.
func TestStreamsKeepOrderAndContent(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		pieces := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 1, 2000), 1, 20).Draw(rt, "pieces")
		waits := rapid.SliceOfN(rapid.IntRange(0, 3), len(pieces), len(pieces)).Draw(rt, "waits")
		size := rapid.IntRange(1, 3000).Draw(rt, "size")
		synctest.Test(t, func(t *testing.T) {
			n := New(1)
			defer n.Close()
			near, far := pair(t, n)
			go func() {
				for i, p := range pieces {
					switch waits[i] {
					case 1:
						n.Delay("a", "b", time.Duration(i)*time.Millisecond)
					case 2:
						n.Cut("a", "b")
						time.AfterFunc(5*time.Millisecond, n.Heal)
					case 3:
						time.Sleep(time.Millisecond)
					}
					_, _ = near.Write(p)
				}
				_ = near.Close()
			}()
			var got []byte
			b := make([]byte, size)
			for {
				k, err := far.Read(b)
				got = append(got, b[:k]...)
				if err != nil {
					break
				}
			}
			if want := bytes.Join(pieces, nil); !bytes.Equal(got, want) {
				t.Errorf("read %d bytes, not the %d written", len(got), len(want))
			}
		})
	})
}
