package contentlog_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"headgate/proxy/contentlog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var noon = time.Date(2026, 5, 3, 12, 0, 0, 0, time.UTC)

// forever keeps the janitor away from entries with fixed times.
const forever = 100 * 365 * 24 * time.Hour

func open(t *testing.T, cfg contentlog.Config, policies map[string]contentlog.Policy) *contentlog.Log {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	l, err := contentlog.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeLog(t, l) })
	if err := l.SetPolicies(policies); err != nil {
		t.Fatal(err)
	}
	return l
}

func closeLog(t *testing.T, l *contentlog.Log) {
	t.Helper()
	if err := l.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func all(tenants ...string) map[string]contentlog.Policy {
	p := map[string]contentlog.Policy{}
	for _, t := range tenants {
		p[t] = contentlog.Policy{Mode: contentlog.All, Retention: forever}
	}
	return p
}

func entry(id, tenant, user string) contentlog.Entry {
	return contentlog.Entry{
		RequestID: id, Tenant: tenant, User: user, Time: noon, Status: 200,
		Request: []byte(`{"prompt": "hello"}`), Answer: []byte(`{"text":"world"}`),
	}
}

type record struct {
	RequestID        string          `json:"request_id"`
	Tenant           string          `json:"tenant"`
	User             string          `json:"user"`
	Time             time.Time       `json:"time"`
	Request          json.RawMessage `json:"request"`
	RequestText      string          `json:"request_text"`
	RequestTruncated bool            `json:"request_truncated"`
	Answer           json.RawMessage `json:"answer"`
	AnswerText       string          `json:"answer_text"`
	AnswerTruncated  bool            `json:"answer_truncated"`
}

type exporter func(io.Writer, contentlog.Filter) (int, error)

func inDir(dir string) exporter {
	return func(w io.Writer, f contentlog.Filter) (int, error) { return contentlog.ExportDir(dir, w, f) }
}

func export(t *testing.T, from exporter, f contentlog.Filter) []record {
	t.Helper()
	var b bytes.Buffer
	n, err := from(&b, f)
	if err != nil {
		t.Fatal(err)
	}
	var out []record
	for dec := json.NewDecoder(&b); dec.More(); {
		var r record
		if err := dec.Decode(&r); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	if n != len(out) {
		t.Errorf("export says %d, wrote %d", n, len(out))
	}
	return out
}

func ids(records []record) string {
	var out []string
	for _, r := range records {
		out = append(out, r.RequestID)
	}
	return strings.Join(out, " ")
}

func contentFiles(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestFilesAndForm(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "content")
	l := open(t, contentlog.Config{Dir: dir, MaxBody: 64}, all("Acme/eu:1"))
	e := entry("r1", "Acme/eu:1", "bob")
	e.Key, e.Model, e.Route, e.Failed = "k1", "llama", "chat", true
	e.Answer = []byte("data: {\"a\":\"<b>\"}\n\n")
	l.Keep(e)
	e.RequestID, e.Request, e.Answer = "r2", []byte(`"`+strings.Repeat("x", 64)+`"`), []byte("\xff\xfe!")
	l.Keep(e)
	got := export(t, l.Export, contentlog.Filter{})
	if ids(got) != "r1 r2" || string(got[0].Request) != `{"prompt":"hello"}` || got[0].AnswerText != string("data: {\"a\":\"<b>\"}\n\n") {
		t.Errorf("got %+v", got)
	}
	if !got[1].RequestTruncated || got[1].RequestText != `"`+strings.Repeat("x", 63) || got[1].AnswerText != "\uFFFD!" {
		t.Errorf("cut or broken bodies: %+v", got[1])
	}
	want := filepath.Join(dir, "%41cme%2feu%3a1.2026-05-03.0001.jsonl")
	if files := contentFiles(t, dir); len(files) != 1 || files[0] != want {
		t.Fatalf("files %q", files)
	}
	for path, mode := range map[string]os.FileMode{want: 0o600, dir: 0o700} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v %v", path, info.Mode(), err)
		}
	}
	text, _ := os.ReadFile(want)
	first, _, _ := strings.Cut(string(text), "\n")
	const form = `{"time":"2026-05-03T12:00:00Z","request_id":"r1","tenant":"Acme/eu:1","user":"bob","key":"k1","model":"llama",` +
		`"route":"chat","status":200,"failed":true,"request":{"prompt":"hello"},"answer_text":"data: {\"a\":\"<b>\"}\n\n"}`
	if first != form {
		t.Errorf("line\n%s\nwant\n%s", first, form)
	}
}

func TestModes(t *testing.T) {
	l := open(t, contentlog.Config{}, map[string]contentlog.Policy{
		"all":    {Mode: contentlog.All, Retention: forever},
		"errors": {Mode: contentlog.Errors, Retention: forever},
		"off":    {Mode: contentlog.Off},
		"zero":   {},
		"none":   {Mode: contentlog.Sample},
		"whole":  {Mode: contentlog.Sample, SampleMillionths: 1_000_000, Retention: forever},
	})
	for _, tenant := range []string{"all", "errors", "off", "zero", "none", "whole", "unknown"} {
		e := entry(tenant+"-ok", tenant, "")
		l.Keep(e)
		e.RequestID, e.Failed = tenant+"-bad", true
		l.Keep(e)
	}
	if got := ids(export(t, l.Export, contentlog.Filter{})); got != "all-ok all-bad errors-bad whole-ok whole-bad" {
		t.Errorf("kept %s", got)
	}
	if l.Dropped() != 0 {
		t.Errorf("dropped %d", l.Dropped())
	}
}

func TestSampleIsAShareAndTheSameOnEveryNode(t *testing.T) {
	policies := map[string]contentlog.Policy{"acme": {Mode: contentlog.Sample, SampleMillionths: 100_000, Retention: forever}}
	const n = 20_000
	var kept [2]string
	for node := range kept {
		l := open(t, contentlog.Config{QueueSize: n}, policies)
		for i := range n {
			l.Keep(entry(fmt.Sprintf("req-%d", i), "acme", ""))
		}
		got := export(t, l.Export, contentlog.Filter{})
		kept[node] = ids(got)
		if len(got) < n/10-n/100 || len(got) > n/10+n/100 {
			t.Errorf("kept %d of %d at a tenth", len(got), n)
		}
	}
	if kept[0] != kept[1] {
		t.Error("two nodes chose differently")
	}
}

func TestSetPoliciesAllOrNothing(t *testing.T) {
	l := open(t, contentlog.Config{}, all("acme"))
	for name, p := range map[string]contentlog.Policy{
		"mode":      {Mode: "some"},
		"share":     {Mode: contentlog.Sample, SampleMillionths: 1_000_001},
		"retention": {Retention: -1},
		"rule":      {Redact: []string{"("}},
		"long rule": {Redact: []string{strings.Repeat("a", 1025)}},
		"rules":     {Redact: make([]string, 33)},
		"folder":    {Mode: contentlog.All, Dir: "/dev/null/x"},
	} {
		if err := l.SetPolicies(map[string]contentlog.Policy{"other": p}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	l.Keep(entry("r1", "acme", ""))
	if got := ids(export(t, l.Export, contentlog.Filter{})); got != "r1" {
		t.Errorf("the old policy is gone: %q", got)
	}
}

func TestConfigValidate(t *testing.T) {
	for name, c := range map[string]contentlog.Config{
		"no folder": {Logger: slog.New(slog.DiscardHandler)},
		"no logger": {Dir: "x"},
		"body":      {Dir: "x", Logger: slog.New(slog.DiscardHandler), MaxBody: 5 << 20},
		"negative":  {Dir: "x", Logger: slog.New(slog.DiscardHandler), QueueSize: -1},
	} {
		if _, err := contentlog.Open(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestFilters(t *testing.T) {
	other := t.TempDir()
	policies := all("a", "b")
	policies["c"] = contentlog.Policy{Mode: contentlog.All, Retention: forever, Dir: other}
	l := open(t, contentlog.Config{}, policies)
	for i, e := range []contentlog.Entry{entry("0", "a", "bob"), entry("1", "a", "eve"), entry("2", "b", "bob"), entry("3", "c", "b\xffb")} {
		e.Time = noon.Add(time.Duration(i) * 24 * time.Hour)
		l.Keep(e)
	}
	day := func(n int) time.Time { return noon.AddDate(0, 0, n) }
	cases := []struct {
		f    contentlog.Filter
		want string
	}{
		{contentlog.Filter{Tenant: "a"}, "0 1"},
		{contentlog.Filter{User: "bob"}, "0 2"},
		{contentlog.Filter{Tenant: "b", User: "bob"}, "2"},
		{contentlog.Filter{Tenant: "c", User: "b\xffb"}, "3"},
		{contentlog.Filter{Since: day(1), Until: day(2)}, "1"},
		{contentlog.Filter{Tenant: "a", Since: day(0).Add(1)}, "1"},
		{contentlog.Filter{Until: day(0)}, ""},
		{contentlog.Filter{Until: day(0).Add(1)}, "0"},
		{contentlog.Filter{User: "nobody"}, ""},
	}
	for _, c := range cases {
		if got := ids(export(t, l.Export, c.f)); got != c.want {
			t.Errorf("%+v: %q, want %q", c.f, got, c.want)
		}
	}
	if _, err := l.Erase(contentlog.Filter{}); !errors.Is(err, contentlog.ErrEmptyFilter) {
		t.Errorf("an empty erasure: %v", err)
	}
	if n, err := l.Erase(contentlog.Filter{User: "bob"}); n != 2 || err != nil {
		t.Errorf("erased %d, %v", n, err)
	}
	if n, err := l.Erase(contentlog.Filter{Tenant: "c"}); n != 1 || err != nil {
		t.Errorf("erased %d, %v", n, err)
	}
	if got := ids(export(t, l.Export, contentlog.Filter{})); got != "1" {
		t.Errorf("left %q", got)
	}
}

func TestTornTailAfterACrash(t *testing.T) {
	dir := t.TempDir()
	l := open(t, contentlog.Config{Dir: dir}, all("acme"))
	l.Keep(entry("r1", "acme", "bob"))
	closeLog(t, l)
	path := contentFiles(t, dir)[0]
	whole, _ := os.ReadFile(path)
	for _, torn := range []string{`{"time":"2026-05-03T12:00:00Z","tenant":"acme","user":"bo`, strings.Repeat("x", 200_000)} {
		if err := os.WriteFile(path, append(slices.Clip(whole), torn...), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := ids(export(t, inDir(dir), contentlog.Filter{})); got != "r1" {
			t.Errorf("with a torn tail: %q", got)
		}
		l := open(t, contentlog.Config{Dir: dir}, all("acme"))
		l.Keep(entry("r2", "acme", "eve"))
		closeLog(t, l)
		if got, _ := os.ReadFile(path); bytes.Count(got, []byte("\n")) != 2 || ids(export(t, inDir(dir), contentlog.Filter{})) != "r1 r2" {
			t.Errorf("after the next append:\n%s", got)
		}
	}
	// An erasure of somebody else takes the torn line too: it may be anybody's.
	if err := os.WriteFile(path, append(slices.Clip(whole), `{"user":"ev`...), 0o600); err != nil {
		t.Fatal(err)
	}
	if n, err := contentlog.EraseDir(dir, contentlog.Filter{User: "eve"}); n != 0 || err != nil {
		t.Errorf("erased %d, %v", n, err)
	}
	if got, _ := os.ReadFile(path); !bytes.Equal(got, whole) {
		t.Errorf("left\n%s", got)
	}
}

func TestUnfinishedRewriteIsRemoved(t *testing.T) {
	dir := t.TempDir()
	left := filepath.Join(dir, ".rewrite")
	if err := os.WriteFile(left, []byte("somebody's words"), 0o600); err != nil {
		t.Fatal(err)
	}
	open(t, contentlog.Config{Dir: dir}, nil)
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("still there: %v", err)
	}
}

func TestRotationByTwoNodesInOneFolder(t *testing.T) {
	dir := t.TempDir()
	const each = 300
	var wg sync.WaitGroup
	for node := range 2 {
		l := open(t, contentlog.Config{Dir: dir, MaxFile: 2000}, all("acme"))
		wg.Go(func() {
			for i := range each {
				l.Keep(entry(fmt.Sprintf("%d-%d", node, i), "acme", ""))
				if i%10 == 0 { // many batches
					if _, err := l.Export(io.Discard, contentlog.Filter{Tenant: "nobody"}); err != nil {
						t.Error(err)
					}
				}
			}
			closeLog(t, l)
		})
	}
	wg.Wait()
	got := export(t, inDir(dir), contentlog.Filter{})
	next := [2]int{}
	for _, r := range got {
		var node, i int
		if _, err := fmt.Sscanf(r.RequestID, "%d-%d", &node, &i); err != nil {
			t.Fatal(err)
		}
		if i != next[node] {
			t.Fatalf("node %d: entry %d where %d is due", node, i, next[node])
		}
		next[node]++
	}
	if next != [2]int{each, each} {
		t.Errorf("kept %v", next)
	}
	files := contentFiles(t, dir)
	if len(files) < 10 {
		t.Errorf("%d files", len(files))
	}
	// A node that starts goes on behind the newest file, also where an older one is gone.
	if err := os.Remove(files[0]); err != nil {
		t.Fatal(err)
	}
	l := open(t, contentlog.Config{Dir: dir, MaxFile: 2000}, all("acme"))
	l.Keep(entry("last", "acme", ""))
	if got := export(t, l.Export, contentlog.Filter{}); got[len(got)-1].RequestID != "last" {
		t.Error("the order is lost")
	}
}

func TestEraseWhileWriting(t *testing.T) {
	dir := t.TempDir()
	l := open(t, contentlog.Config{Dir: dir, MaxFile: 4000, QueueSize: 4096}, all("acme"))
	const n = 2000
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range n {
			l.Keep(entry(fmt.Sprint(i), "acme", []string{"bob", "eve"}[i%2]))
			if i%5 == 0 { // many batches
				if _, err := l.Export(io.Discard, contentlog.Filter{Tenant: "nobody"}); err != nil {
					t.Error(err)
				}
			}
		}
	}()
	total := 0
	erase := func(erase func(contentlog.Filter) (int, error)) {
		n, err := erase(contentlog.Filter{Tenant: "acme", User: "bob"})
		total += n
		if err != nil {
			t.Error(err)
		}
	}
	for writing := true; writing; {
		select {
		case <-done:
			writing = false
		default:
			erase(func(f contentlog.Filter) (int, error) { return contentlog.EraseDir(dir, f) }) // another process
		}
	}
	erase(l.Erase) // reaches the queue too
	got := export(t, l.Export, contentlog.Filter{})
	for i, r := range got {
		if r.User != "eve" || r.RequestID != fmt.Sprint(2*i+1) {
			t.Fatalf("entry %d is %s of %s", i, r.RequestID, r.User)
		}
	}
	if len(got) != n/2 || total != n/2 || l.Dropped() != 0 {
		t.Errorf("left %d, erased %d, dropped %d", len(got), total, l.Dropped())
	}
	if _, err := l.Erase(contentlog.Filter{Tenant: "acme"}); err != nil || len(contentFiles(t, dir)) != 0 {
		t.Errorf("empty files are left: %v, %v", contentFiles(t, dir), err)
	}
}

func TestRetention(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		policies := map[string]contentlog.Policy{
			"short": {Mode: contentlog.All, Retention: 90 * time.Minute},
			"long":  {Mode: contentlog.All, Retention: 48 * time.Hour},
			"gone":  {Mode: contentlog.All, Retention: forever},
		}
		l := open(t, contentlog.Config{Dir: dir}, policies)
		left := func(want string) {
			t.Helper()
			synctest.Wait()
			if got := ids(export(t, l.Export, contentlog.Filter{})); got != want {
				t.Errorf("after %v: left %q, want %q", time.Since(start), got, want)
			}
		}
		keep := func(id string, at time.Duration) {
			e := entry(id, id[:strings.IndexByte(id, '-')], "")
			e.Time = start.Add(at)
			l.Keep(e)
		}
		keep("gone-1", 0)
		keep("long-1", 0)
		keep("short-1", 0)
		time.Sleep(time.Hour)
		keep("short-2", time.Hour)
		left("gone-1 long-1 short-1 short-2")
		time.Sleep(time.Hour + time.Second)
		left("gone-1 long-1 short-2") // a file is rewritten, not only removed
		time.Sleep(time.Hour)
		left("gone-1 long-1")
		delete(policies, "gone")
		if err := l.SetPolicies(policies); err != nil {
			t.Fatal(err)
		}
		time.Sleep(46 * time.Hour)
		left("gone-1")
		time.Sleep(29 * 24 * time.Hour)
		left("") // DefaultRetention, for want of a policy
		closeLog(t, l)
	})
	if files := contentFiles(t, dir); len(files) != 0 {
		t.Errorf("left %v", files)
	}
}

func TestShorterRetentionActsAtOnce(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		l := open(t, contentlog.Config{Dir: dir}, all("acme"))
		e := entry("r1", "acme", "")
		e.Time = time.Now().Add(-72 * time.Hour)
		l.Keep(e)
		synctest.Wait()
		if err := l.SetPolicies(map[string]contentlog.Policy{"acme": {Mode: contentlog.Off, Retention: 24 * time.Hour}}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if files := contentFiles(t, dir); len(files) != 0 {
			t.Errorf("left %v", files)
		}
		closeLog(t, l)
	})
}

// holdLock keeps every writer of a folder waiting, as a slow disk would.
func holdLock(t *testing.T, dir string) (release func()) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return sync.OnceFunc(func() { f.Close() })
}

func TestFullQueueDropsAndCounts(t *testing.T) {
	for name, cfg := range map[string]contentlog.Config{
		"entries": {QueueSize: 4},
		"bytes":   {QueueSize: 1 << 16, QueueBytes: 2000},
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Dir = t.TempDir()
			l := open(t, cfg, all("acme"))
			release := holdLock(t, cfg.Dir)
			defer release()
			const n = 1000
			for i := range n {
				l.Keep(entry(fmt.Sprint(i), "acme", ""))
			}
			dropped := l.Dropped()
			if dropped < n/2 {
				t.Errorf("dropped %d of %d", dropped, n)
			}
			release()
			if got := export(t, l.Export, contentlog.Filter{}); int64(len(got))+dropped != n {
				t.Errorf("kept %d, dropped %d of %d", len(got), dropped, n)
			}
			l.Keep(entry("later", "acme", "")) // there is room again
			if got := ids(export(t, l.Export, contentlog.Filter{})); !strings.HasSuffix(got, "later") {
				t.Error("nothing is kept any more")
			}
		})
	}
}

func TestCloseGivesUpWithItsContext(t *testing.T) {
	dir := t.TempDir()
	l := open(t, contentlog.Config{Dir: dir}, all("acme"))
	release := holdLock(t, dir)
	defer release()
	const n = 200 // more than a batch
	for i := range n {
		l.Keep(entry(fmt.Sprint(i), "acme", ""))
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := l.Close(ctx); err == nil {
		t.Fatal("closed under a held lock")
	}
	l.Keep(entry("late", "acme", ""))
	release()
	closeLog(t, l)
	got := export(t, inDir(dir), contentlog.Filter{})
	if int64(len(got))+l.Dropped() != n+1 || l.Dropped() == 1 {
		t.Errorf("kept %d, dropped %d of %d", len(got), l.Dropped(), n+1)
	}
}

func TestRefusingDiskIsCountedAndSaidOnce(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "acme.2026-05-03.0001.jsonl"), 0o700); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	l := open(t, contentlog.Config{Dir: dir, Logger: slog.New(slog.NewTextHandler(&out, nil))}, all("acme", "other"))
	for range 3 {
		l.Keep(entry("secret", "acme", ""))
		_, _ = l.Erase(contentlog.Filter{Tenant: "nobody"})
	}
	l.Keep(entry("r1", "other", ""))
	closeLog(t, l)
	if l.Dropped() != 3 || strings.Count(out.String(), "cannot write") != 1 || strings.Contains(out.String(), "hello") {
		t.Errorf("dropped %d, log %s", l.Dropped(), out.String())
	}
	if got := ids(export(t, inDir(dir), contentlog.Filter{Tenant: "other"})); got != "r1" {
		t.Errorf("another tenant suffers: %q", got)
	}
}

func TestKeepOfWhatIsNotWantedAllocatesNothing(t *testing.T) {
	l := open(t, contentlog.Config{}, map[string]contentlog.Policy{"acme": {Mode: contentlog.Sample, SampleMillionths: 0}})
	e := entry("r1", "acme", "bob")
	if n := testing.AllocsPerRun(100, func() { l.Keep(e) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
