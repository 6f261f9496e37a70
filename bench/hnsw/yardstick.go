package hnsw

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

//go:embed yardstick/yardstick.cpp
var yardstickSource []byte

// errNoYardstick says what to install.
var errNoYardstick = errors.New("g++ or hnswlib is missing (Debian: g++ libhnswlib-dev): nothing to compare with")

// compileYardstick compiles the program that runs hnswlib into dir.
func compileYardstick(ctx context.Context, dir string) (binary string, err error) {
	source := filepath.Join(dir, "yardstick.cpp")
	if err := os.WriteFile(source, yardstickSource, 0o600); err != nil {
		return "", err
	}
	binary = filepath.Join(dir, "yardstick")
	out, err := exec.CommandContext(ctx, "g++", "-std=c++17", "-O3", "-march=native", "-DNDEBUG", "-o", binary, source).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %w: %s", errNoYardstick, err, out)
	}
	return binary, nil
}

// yardstick is hnswlib with an index, in a process of its own.
type yardstick struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	found []uint32
	build time.Duration // CPU
	bytes int64
}

// startYardstick builds an index of data, and returns when it stands.
func startYardstick(ctx context.Context, binary string, d *data, c *Config) (*yardstick, error) {
	arg := func(n int) string { return strconv.Itoa(n) }
	y := &yardstick{found: make([]uint32, d.queries()*k)}
	y.cmd = exec.CommandContext(ctx, binary, d.baseFile, arg(d.len()), d.queryFile, arg(d.queries()), arg(d.dim), arg(c.M), arg(c.EfConstruction), arg(k))
	y.cmd.Stderr = os.Stderr
	var err error
	if y.in, err = y.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := y.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	y.out = bufio.NewReader(out)
	if err := y.cmd.Start(); err != nil {
		return nil, err
	}
	var seconds float64
	if _, err := fmt.Fscanf(y.out, "built %g %d\n", &seconds, &y.bytes); err != nil {
		return nil, errors.Join(fmt.Errorf("yardstick: %w", err), y.stop())
	}
	y.build = time.Duration(seconds * 1e9)
	return y, nil
}

// search asks all queries, and leaves in y.found what was found.
func (y *yardstick) search(ef int) (cpu time.Duration, err error) {
	if _, err := fmt.Fprintln(y.in, ef); err != nil {
		return 0, fmt.Errorf("yardstick: %w", err)
	}
	var seconds float64
	if _, err := fmt.Fscanf(y.out, "searched %g\n", &seconds); err != nil {
		return 0, fmt.Errorf("yardstick: %w", err)
	}
	return time.Duration(seconds * 1e9), binary.Read(y.out, binary.NativeEndian, y.found)
}

func (y *yardstick) stop() error {
	_ = y.in.Close()
	return y.cmd.Wait()
}
