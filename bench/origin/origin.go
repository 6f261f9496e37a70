// Package origin says where the figures of a benchmark come from, for its report.
package origin

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
)

// Machine describes where the figures were taken.
func Machine() string {
	parts := []string{runtime.GOOS + "/" + runtime.GOARCH, fmt.Sprintf("%d cores", runtime.NumCPU()), runtime.Version()}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
				parts = append(parts, strings.TrimSpace(v))
				break
			}
		}
	}
	for _, f := range [...]struct{ file, label string }{{"/proc/sys/kernel/osrelease", "kernel"}, {"/proc/loadavg", "load at start"}} {
		if b, err := os.ReadFile(f.file); err == nil {
			parts = append(parts, f.label+" "+strings.TrimSpace(string(b)))
		}
	}
	return strings.Join(parts, ", ")
}

// Commit is the one this binary was built from, or that of the working directory.
func Commit(ctx context.Context) string {
	rev, dirty := "", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				rev = s.Value
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = " with changes"
			}
		}
	}
	if rev == "" {
		if out, err := exec.CommandContext(ctx, "git", "rev-parse", "HEAD").Output(); err == nil {
			rev = strings.TrimSpace(string(out))
		}
	}
	return cmp.Or(rev, "unknown") + dirty
}
