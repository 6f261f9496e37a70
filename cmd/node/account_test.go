package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"headgate/proxy/admin"
)

// audited waits for an entry of an action and returns it.
func audited(t *testing.T, n *Node, action string) (entry object) {
	t.Helper()
	waitFor(t, action+" is in the audit log", func() bool {
		for _, e := range must[objects](t, n, 200, "GET", "audit", rootBearer, "") {
			if e["action"] == action {
				entry = e
				return true
			}
		}
		return false
	})
	return entry
}

// TestWhoLookedIntoAndErasedContent is in the audit log.
func TestWhoLookedIntoAndErasedContent(t *testing.T) {
	n, _ := governed(t)
	if status, text := ask(t, n, "GET", "/admin/v1/content?tenant=acme&since=2026-01-02", rootBearer, ""); status != 200 {
		t.Fatalf("%d: %s", status, text)
	}
	must[object](t, n, 200, "DELETE", "content?user=u-17", rootBearer, "")
	if e := audited(t, n, "content.export"); e["actor"] != "root" || !strings.Contains(fmt.Sprint(e["after"]), `tenant "acme", since 2026-01-02T00:00:00Z`) {
		t.Errorf("%v", e)
	}
	if e := audited(t, n, "content.erase"); e["actor"] != "root" || !strings.Contains(fmt.Sprint(e["after"]), `user "u-17"`) {
		t.Errorf("%v", e)
	}
}

// TestWhoRestored is in the audit log that was restored, and what may have been done is not called wrong.
func TestWhoRestored(t *testing.T) {
	n, _ := governed(t)
	_, backup := ask(t, n, "GET", "/admin/v1/ledger/backup", rootBearer, "")
	root := admin.Actor{Name: "root", Role: admin.RoleAdmin}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := n.restore(gone, root, strings.NewReader(backup), true)
	if e, ok := errors.AsType[*admin.Error](err); !ok || e.Code != admin.Unknown {
		t.Errorf("who asked has gone: %v", err)
	}
	_, err = n.restore(t.Context(), root, bytes.NewReader([]byte(backup)[:len(backup)/2]), true)
	if e, ok := errors.AsType[*admin.Error](err); !ok || e.Code != admin.Invalid {
		t.Errorf("half a backup: %v", err)
	}
	hash := must[object](t, n, 200, "POST", "ledger/restore?force=true", rootBearer, backup)["state_hash"].(string)
	if e := audited(t, n, "ledger.restore"); e["actor"] != "root" || !strings.Contains(fmt.Sprint(e["after"]), hash[:12]) { // long ones are cut there
		t.Errorf("%v", e)
	}
}
