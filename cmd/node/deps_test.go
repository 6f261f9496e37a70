package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const modulePrefix = "headgate/"

// arrow lets a room import others. Both sides are paths below the module; one that
// ends in /... covers what lies below it, too.
type arrow struct {
	from string
	to   []string
}

// arrows are all there may be, the most particular first. A package of which none speaks
// fails the test: where it stands is decided here before it is built.
var arrows = []arrow{
	{"limiter", nil},
	{"lease/leasepb", nil},
	{"lease", []string{"limiter", "lease/leasepb"}},
	{"lease/leasetest", []string{"limiter", "lease"}},
	{"lease/budget", []string{"limiter"}},
	{"cluster/ledger/ledgerpb", nil},
	{"cluster/ledger", []string{"limiter", "cluster/ledger/ledgerpb"}},
	{"cluster/clusterpb", nil},
	{"cluster/clustertest", []string{"cluster", "cluster/ledger", "cluster/ledger/ledgerpb"}},
	{"cluster/pki", nil},
	{"cluster", []string{"cluster/ledger", "cluster/ledger/ledgerpb", "cluster/clusterpb", "cluster/pki"}},
	{"proxy/openai", nil},
	{"proxy/admin", nil},
	{"proxy/contentlog", nil},
	{"proxy/journal/journalpb", nil},
	{"proxy/journal", []string{"proxy/journal/journalpb"}},
	{"proxy/upstream", []string{"limiter"}},
	{"proxy/queue", nil},
	{"proxy/capacity", nil},
	{"proxy/dispatch/dispatchpb", nil},
	{"proxy/dispatch", []string{"proxy/queue", "proxy/capacity", "proxy/dispatch/dispatchpb"}},
	{"proxy/route", []string{"proxy/affinity"}},
	{"proxy/affinity", nil},
	{"proxy/ladder", []string{"proxy/openai"}},
	{"proxy/edge", []string{"limiter"}},
	{"proxy", []string{"limiter", "proxy/..."}},
	{"cache/cachepb", nil},
	{"cache", []string{"cache/cachepb"}},
	{"cache/vec", nil},
	{"cache/hnsw", []string{"cache/vec"}},
	{"cache/embed/...", []string{"cache/vec", "cache/embed/..."}},
	{"cache/guard", nil},
	{"cache/threshold", nil},
	{"cache/semantic/semanticpb", []string{"cache/cachepb"}},
	{"cache/semantic", []string{"cache", "cache/cachepb", "cache/hnsw", "cache/guard", "cache/threshold", "cache/vec", "cache/semantic/semanticpb"}},
	{"cache/calibrate", []string{"cache/embed", "cache/guard", "cache/threshold", "cache/vec"}},
	{"bench/...", []string{"limiter", "lease/...", "cluster/...", "proxy/...", "cache/...", "cmd/node", "bench/..."}},
	{"cmd/node", []string{"limiter", "lease", "lease/budget", "cluster/...", "proxy/...", "cache", "cache/embed", "cache/guard", "cache/hnsw", "cache/semantic", "cache/threshold", "cache/vec"}},
	{"cmd/headgate", []string{"limiter", "lease/...", "cluster/...", "proxy/...", "cache", "cache/...", "cmd/node", "bench/..."}},
}

// goPackage is what `go list -json` tells of a package: its imports without its tests'.
type goPackage struct {
	ImportPath string
	Imports    []string
}

func covers(pattern, path string) bool {
	below, deep := strings.CutSuffix(pattern, "/...")
	return path == below || deep && strings.HasPrefix(path, below+"/")
}

// wrongArrows names every import that no arrow allows.
func wrongArrows(packages []goPackage) (wrong []string) {
	for _, p := range packages {
		path := strings.TrimPrefix(p.ImportPath, modulePrefix)
		i := slices.IndexFunc(arrows, func(a arrow) bool { return covers(a.from, path) })
		if i < 0 {
			wrong = append(wrong, fmt.Sprintf("%s has no place in the import graph", path))
			continue
		}
		for _, imported := range p.Imports {
			to, ours := strings.CutPrefix(imported, modulePrefix)
			if ours && !slices.ContainsFunc(arrows[i].to, func(pattern string) bool { return covers(pattern, to) }) {
				wrong = append(wrong, fmt.Sprintf("%s must not import %s", path, to))
			}
		}
	}
	return wrong
}

// TestImportsPointOneWay holds the rooms apart: what they need of each other they
// declare as interfaces, and this package joins them.
func TestImportsPointOneWay(t *testing.T) {
	list := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports", modulePrefix+"...")
	list.Dir = "../.."
	out, err := list.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var packages []goPackage
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
	if len(packages) < len(arrows)/2 {
		t.Fatalf("go list found %d packages", len(packages))
	}
	for _, w := range wrongArrows(packages) {
		t.Error(w)
	}
}

func TestWrongArrowsAreFound(t *testing.T) {
	for _, c := range []struct {
		from, to string
		ok       bool
	}{
		{"limiter", "lease", false},
		{"lease", "limiter", true},
		{"lease", "cluster/ledger", false},
		{"cluster/ledger", "proxy", false},
		{"proxy/openai", "limiter", false},
		{"proxy/admin", "limiter", false},
		{"proxy/contentlog", "proxy", false},
		{"proxy/edge", "proxy/openai", false},
		{"proxy", "proxy/edge", true},
		{"proxy", "lease", false},
		{"proxy", "cluster/ledger", false},
		{"cmd/node", "proxy/edge", true},
		{"cmd/node", "bench/fakevllm", false},
		{"bench/gateway", "bench/load", true},
		{"bench/gateway", "cmd/headgate", false},
		{"bench/gateway", "cmd/node", true},
		{"cmd/headgate", "bench/fakevllm", true},
		{"util", "limiter", false},
	} {
		wrong := wrongArrows([]goPackage{{modulePrefix + c.from, []string{"fmt", modulePrefix + c.to}}})
		if ok := len(wrong) == 0; ok != c.ok {
			t.Errorf("%s → %s: allowed is %v, want %v", c.from, c.to, ok, c.ok)
		}
	}
}
