package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/redis/rueidis"
)

// spendScript is a budget as gateways keep it in Redis: what is left of it, checked and lowered in one step.
// KEYS: the account. ARGV: the cost, the budget's amount.
const spendScript = `
local left = tonumber(redis.call('GET', KEYS[1]) or ARGV[2])
local cost = tonumber(ARGV[1])
if left < cost then return 0 end
redis.call('SET', KEYS[1], string.format('%.0f', left - cost))
return 1`

// redisAmount is what a script's numbers still count one by one.
const redisAmount = 1 << 52

// redisDecisions measures decisions by a script in Redis on the same disk, with a sync before each answer; where
// there is no Redis it says so.
func redisDecisions(ctx context.Context, c config, dir string, rep *report) (err error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		rep.note("redis-server is not on this machine: apt-get install redis-server")
		return nil
	}
	address, stop, err := startRedis(path, dir)
	if err != nil {
		return err
	}
	defer stop()
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{address}, DisableCache: true})
	if err != nil {
		return err
	}
	defer client.Close()
	script := rueidis.NewLuaScript(spendScript)
	arguments := []string{strconv.Itoa(cost), strconv.Itoa(redisAmount)}
	for _, accounts := range accountsOf() {
		keys := make([][]string, accounts)
		for i := range keys {
			keys[i] = []string{fmt.Sprintf("acme/user-month/user-%d@example.com/%d", i, accounts)}
		}
		for _, callers := range callersOf() {
			s, err := drive(ctx, callers, c.each, 0, func(caller, turn int) error {
				ok, err := script.Exec(ctx, client, keys[(caller*7919+turn)%accounts], arguments).AsInt64()
				if err == nil && ok != 1 {
					err = errors.New("the budget is spent")
				}
				return err
			})
			if err != nil {
				return err
			}
			rep.add(key{redised, callers, accounts, 0}, s)
		}
	}
	return nil
}

// startRedis starts Debian's Redis as it comes, but for its port and how it keeps its data.
func startRedis(path, dir string) (address string, stop func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	address = l.Addr().String()
	_, port, err := net.SplitHostPort(address)
	if err = errors.Join(err, l.Close()); err != nil {
		return "", nil, err
	}
	c := exec.Command(path, "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", dir)
	out, err := c.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := c.Start(); err != nil {
		return "", nil, err
	}
	ready, ended := make(chan bool, 1), make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(out); lines.Scan(); { // to its end, so that it never waits for a reader
			if strings.Contains(lines.Text(), "Ready to accept connections") {
				ready <- true
			}
		}
		ready <- false
	}()
	stop = func() {
		_ = c.Process.Kill() // it has nothing to keep
		<-ended
		_ = c.Wait()
	}
	if !<-ready {
		stop()
		return "", nil, errors.New("redis-server ended before it was ready")
	}
	return address, stop, nil
}
