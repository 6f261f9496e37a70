package admin

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net/http"
	"strings"
)

// Role is what an admin token may do; each role may do what those below it may. The zero
// value may do nothing.
type Role int

// The roles, the least first.
const (
	RoleRead    Role = iota + 1 // look
	RoleOperate                 // also what an incident needs: kill, ladder, override, revoke a key, end kept answers
	RoleAdmin                   // also what changes who may do what, and the ledger as a whole
)

func (r Role) String() string {
	switch r {
	case RoleRead:
		return "read"
	case RoleOperate:
		return "operate"
	case RoleAdmin:
		return "admin"
	}
	return "none"
}

// MarshalText writes a role's name.
func (r Role) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads a role's name.
func (r *Role) UnmarshalText(text []byte) error {
	for role := RoleRead; role <= RoleAdmin; role++ {
		if role.String() == string(text) {
			*r = role
			return nil
		}
	}
	return fmt.Errorf("role %q is not one of read, operate, admin", text)
}

// rootName is the actor of the token in the node's environment.
const rootName = "root"

// Actor is who calls.
type Actor struct {
	Name string // of the token; "root" holds the environment's
	Role Role
}

type actorKey struct{}

// actorOf is who made a request that came through authorized.
func actorOf(r *http.Request) Actor {
	a, _ := r.Context().Value(actorKey{}).(Actor)
	return a
}

// authorized lets only those through whose token has the role. Hashing first makes the
// comparison's time independent of the token, its length included.
func (c Config) authorized(need Role, next http.Handler) http.Handler {
	root := sha256.Sum256([]byte(c.Token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(token))
		var who Actor
		switch {
		case !ok || token == "":
			ok = false
		case c.Token != "" && subtle.ConstantTimeCompare(got[:], root[:]) == 1:
			who = Actor{Name: rootName, Role: RoleAdmin}
		case c.Authorize != nil:
			who, ok = c.Authorize(token)
		default:
			ok = false
		}
		if !ok {
			fail(w, Errorf(Unauthorized, "the admin token is missing or wrong; send it as `Authorization: Bearer TOKEN` (HEADGATE_ADMIN_TOKEN)"))
			return
		}
		if need == 0 || who.Role < need {
			fail(w, Errorf(Forbidden, "this needs a token with the role %s; %q has the role %s", need, who.Name, who.Role))
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), actorKey{}, who)))
	})
}
