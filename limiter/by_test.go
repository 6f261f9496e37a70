package limiter

import "testing"

func TestByNames(t *testing.T) {
	want := map[By]string{
		ByLease: "local", ByOwner: "direct", ByRefusal: "refused_local",
		ByPrivate: "private", ByDeny: "deny", ByAllow: "allow", ByAllow + 1: "unknown",
	}
	for by, name := range want {
		if by.String() != name {
			t.Errorf("By(%d) is %q, want %q", by, by, name)
		}
	}
}
