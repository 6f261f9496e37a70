package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestStoredServerIDIsKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	first, err := StoredServerID(dir, "gw-1.eu")
	if err != nil {
		t.Fatal(err)
	}
	if ServerIDName(first) != "gw-1.eu" {
		t.Errorf("%q does not carry the name", first)
	}
	if again, err := StoredServerID(dir, "gw-1.eu"); err != nil || again != first {
		t.Errorf("then %q, %v", again, err)
	}
	if wiped, err := StoredServerID(t.TempDir(), "gw-1.eu"); err != nil || wiped == first {
		t.Errorf("a wiped folder gives %q, %v", wiped, err)
	}
	_, err = StoredServerID(dir, "gw-2")
	if err == nil || !strings.Contains(err.Error(), `"gw-1.eu"`) || !strings.Contains(err.Error(), "--node-id gw-1.eu") {
		t.Errorf("another name: %v", err)
	}
}

func TestStoredServerIDRefusesWhatItDidNotWrite(t *testing.T) {
	for _, content := range []string{"", "gw-1", "gw-1.", ".00000000", "gw-1.0000000g", "gw-1.0000000000", "a b.00000000"} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, nodeIDFile), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if id, err := StoredServerID(dir, "gw-1"); err == nil {
			t.Errorf("%q gave %q", content, id)
		}
	}
	if _, err := StoredServerID(t.TempDir(), "a/b"); err == nil {
		t.Error("a name with a slash was taken")
	}
}

func TestIncarnationsDiffer(t *testing.T) {
	seen := map[uint64]bool{0: true}
	for range 1000 {
		n := NewIncarnation()
		if seen[n] {
			t.Fatalf("%d twice, or 0", n)
		}
		seen[n] = true
	}
}
