package ledger

import (
	"bytes"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	autopilot "github.com/hashicorp/raft-autopilot"
	"pgregory.net/rapid"
)

func TestPlan(t *testing.T) {
	voter := func(id, addr string) raft.Server {
		return raft.Server{ID: raft.ServerID(id), Address: raft.ServerAddress(addr)}
	}
	server := func(id, addr string, s Status) Server {
		return Server{ID: raft.ServerID(id), Name: nodeName(raft.ServerID(id)), Address: raft.ServerAddress(addr), Status: s}
	}
	now := time.Now()
	left := func(id string, ago time.Duration) Server {
		s := server(id, "B", StatusLeft)
		s.Since = now.Add(-ago)
		return s
	}
	members := []raft.Server{voter("a.1", "A"), voter("b.1", "B"), voter("c.1", "C")}
	for _, test := range []struct {
		name  string
		known []Server
		want  []string
	}{
		{"all is well", []Server{server("a.1", "A", StatusAlive), server("b.1", "B", StatusAlive), server("c.1", "C", StatusAlive)}, nil},
		{"failed stays", []Server{server("b.1", "B", StatusFailed)}, nil},
		{"unknown stays", nil, nil},
		{"left goes", []Server{left("b.1", time.Minute)}, []string{"-b.1"}},
		{"left for a restart stays", []Server{left("b.1", time.Minute-1)}, nil},
		{"self never goes", []Server{server("a.1", "A", StatusLeft)}, nil},
		{"joins without a vote", []Server{server("d.1", "D", StatusAlive)}, []string{"+d.1 D Nonvoter"}},
		{"a failed stranger does not join", []Server{server("d.1", "D", StatusFailed)}, nil},
		{"wiped", []Server{server("b.2", "B", StatusAlive)}, []string{"-b.1", "+b.2 B Nonvoter"}},
		{"wiped and moved", []Server{server("b.2", "E", StatusAlive)}, []string{"-b.1", "+b.2 E Nonvoter"}},
		{"moved", []Server{server("c.1", "E", StatusAlive)}, []string{"+c.1 E Voter"}},
		{"address of the dead taken over", []Server{server("d.1", "B", StatusAlive)}, []string{"-b.1", "+d.1 B Nonvoter"}},
		{"address of the living taken over", []Server{server("b.1", "B", StatusAlive), server("d.1", "B", StatusAlive)}, []string{"+d.1 B Nonvoter"}},
	} {
		var got []string
		for _, c := range plan(now, time.Minute, "a.1", members, test.known) {
			if c.remove {
				got = append(got, "-"+string(c.server.ID))
			} else {
				got = append(got, fmt.Sprintf("+%s %s %s", c.server.ID, c.server.Address, c.server.Suffrage))
			}
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}

// drawState makes a cluster whose leader, the server 0, is healthy and has a majority.
func drawState(t *rapid.T, now time.Time) *autopilot.State {
	state := &autopilot.State{Leader: "0", Servers: map[raft.ServerID]*autopilot.ServerState{}}
	voters, healthy := 0, 0
	for i := range rapid.IntRange(1, 9).Draw(t, "servers") {
		id := raft.ServerID(fmt.Sprint(i))
		s := &autopilot.ServerState{Server: autopilot.Server{ID: id}, State: autopilot.RaftNonVoter}
		if i == 0 || rapid.Bool().Draw(t, "votes") {
			s.State = autopilot.RaftVoter
			voters++
		}
		s.Health.Healthy = i == 0 || rapid.IntRange(0, 2).Draw(t, "healthy") > 0
		s.Health.StableSince = now.Add(-time.Duration(rapid.IntRange(0, 100).Draw(t, "stable")) * time.Second)
		if i == 0 {
			s.State = autopilot.RaftLeader
		}
		if s.HasVotingRights() && s.Health.Healthy {
			healthy++
		}
		state.Servers[id] = s
	}
	if healthy < majority(voters) {
		t.Skip("no leader without a majority")
	}
	return state
}

func TestVotesKeepAMajority(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_000_000, 0)
		p := &promoter{now: func() time.Time { return now }}
		p.times.withDefaults()
		state := drawState(t, now)
		before := p.count(state)
		changes := p.CalculatePromotionsAndDemotions(nil, state)
		voters, healthy := before.voters, before.healthyVoters
		for _, id := range changes.Promotions {
			s := state.Servers[id]
			if s.HasVotingRights() || !s.Health.Healthy {
				t.Fatalf("promotes %+v", s)
			}
			voters, healthy = voters+1, healthy+1
			if healthy < majority(voters) {
				t.Fatalf("a promotion leaves %d healthy of %d", healthy, voters)
			}
		}
		if len(changes.Promotions) > 0 && healthy > wantVoters(before.healthy) {
			t.Fatalf("%d healthy voters, wanted %d", healthy, wantVoters(before.healthy))
		}
		for _, id := range changes.Demotions {
			if id == state.Leader || healthy < voters || voters-1 < wantVoters(before.healthy) {
				t.Fatalf("demotes %s of %d voters, %d healthy", id, voters, healthy)
			}
		}
	})
}

func TestFailedVotersAreGivenUpOnlyWhereOthersStand(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_000_000, 0)
		p := &promoter{now: func() time.Time { return now }}
		p.times.withDefaults()
		state := drawState(t, now)
		failed := new(autopilot.FailedServers)
		for id, s := range state.Servers {
			switch {
			case s.Health.Healthy:
			case s.HasVotingRights():
				failed.FailedVoters = append(failed.FailedVoters, &s.Server)
				failed.StaleVoters = append(failed.StaleVoters, id)
			default:
				failed.FailedNonVoters = append(failed.FailedNonVoters, &s.Server)
			}
		}
		c := p.count(state)
		out := p.FilterFailedServerRemovals(nil, state, failed)
		removed := len(out.FailedVoters) + len(out.StaleVoters)
		switch {
		case removed > 1:
			t.Fatalf("gives up %d voters at once", removed)
		case removed == 1 && (c.voters-1 < leastVoters || c.healthyVoters < majority(c.voters) || c.healthyVoters < wantVoters(c.healthy)):
			t.Fatalf("gives up one of %d voters, %d healthy", c.voters, c.healthyVoters)
		}
		for _, s := range out.FailedVoters {
			if now.Sub(state.Servers[s.ID].Health.StableSince) < p.times.FailedFor {
				t.Fatalf("gives up %s too soon", s.ID)
			}
		}
	})
}

func TestLibraryLogs(t *testing.T) {
	var out bytes.Buffer
	logger := RaftLogger(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo})))
	logger.Debug("quiet")
	logger.With("last-index", 3).Named("x").Info("entering state", "leader address", hclog.Fmt("%s!", "a"), "error", fmt.Errorf("no"))
	for range 100 {
		logger.Warn("failed to contact", "server-id", "b")
	}
	got := out.String()
	if strings.Contains(got, "quiet") || strings.Count(got, "failed to contact") != 1 {
		t.Errorf("too much or too little: %s", got)
	}
	for _, want := range []string{`msg="ledger library"`, `component=raft.x`, `event="entering state"`, `last_index=3`, `leader_address=a!`, `error=no`, `server_id=b`} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in %s", want, got)
		}
	}
}
