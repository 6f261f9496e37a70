package ledger

import (
	"strings"
	"testing"
)

// careless is a policy in which earlier releases took everything that stands for one of its words.
func careless(replace ...string) string {
	return strings.NewReplacer(replace...).Replace(`version: 1
backends:
  - {name: b, url: "http://127.0.0.1:8000", slots: 4}
  - {name: other, url: "http://127.0.0.1:8001"}
models:
  - {name: m, aliases: [small], backends: [b, other], fallback: [tiny]}
  - {name: tiny, aliases: [t1], backends: [other]}
  - {name: n, backends: [b]}
plans:
  - {name: p, tier: 1, timeout: 60s}
tenants: [{name: acme, plan: p}]
surfaces: [{name: docs}]
ladder:
  - {rung: drop_optional, models: [m]}
routes:
  - {name: r, match: {models: [m], surfaces: [docs], classes: [background], tenants: [acme]}, to: [{model: n}]}
`)
}

// TestNewPoliciesAreRefusedForSlips: each is said with its line and what to write, and is no reason not to use a
// policy that is in force.
func TestNewPoliciesAreRefusedForSlips(t *testing.T) {
	for _, c := range [...]struct{ is, slip, want string }{
		{"[b, other]", "[b, other, b]", "line 6: models[m].backends[2]: b stands here already; remove one of them"},
		{"[tiny]", "[tiny, n, tiny]", "line 6: models[m].fallback[2]: tiny stands here already; remove one of them"},
		{"[tiny]", "[tiny, t1]", "line 6: models[m].fallback[1]: t1 is the model tiny, which stands here already; remove one of them"},
		{"[tiny]", "[small]", "line 6: models[m].fallback[0]: small is the model m itself; name another"},
		{"[tiny]", "[tiny, n, tiny, n, tiny]", "line 6: models[m].fallback: 5 models are more than 4, of which the last would never be tried; remove some"},
		{"models: [m]}", "models: [m, n, m]}", "line 14: ladder[drop_optional].models[2]: m stands here already; remove one of them"},
		{"models: [m], s", "models: [m, m], s", "line 16: routes[r].match.models[1]: m stands here already; remove one of them"},
		{"[docs]", "[docs, docs]", "line 16: routes[r].match.surfaces[1]: docs stands here already; remove one of them"},
		{"[background]", "[background, background]", "line 16: routes[r].match.classes[1]: background stands here already; remove one of them"},
		{"[acme]", "[acme, acme]", "line 16: routes[r].match.tenants[1]: acme stands here already; remove one of them"},
		{"timeout: 60s", "timeout: 1ns", "line 10: plans[p].timeout: with 1ns every request fails: write 100ms or more, or leave it out for 10m"},
		{"timeout: 60s", "timeout: 99ms", "line 10: plans[p].timeout: with 99ms every request fails"},
		{"tier: 1", "tier: -1", "line 10: plans[p].tier: -1 is not between 0 and 1000: lower tiers are shed first; write 0 for the lowest"},
		{"tier: 1", "tier: 1001", "line 10: plans[p].tier: 1001 is not between 0 and 1000"},
		{"slots: 4", "slots: 1000001", "line 3: backends[b].slots: 1000001 is more than 1000000; write how many requests one endpoint has in flight at most, or leave it out for no bound"},
		{"{name: other, url", "{name: b@c, url: \"http://h\"}\n  - {name: other, url", "line 4: backends[b@c].name: @ stands between the names of a backend and of its endpoint; write another name"},
		{"http://127.0.0.1:8000", "dns://host:0", "line 3: backends[b].url: port 0 does not exist; write 1 to 65535, as in dns://host:8000"},
		{"http://127.0.0.1:8000", "http://host:0/base", "line 3: backends[b].url: port 0 does not exist; write 1 to 65535, as in http://host:8000"},
		{"http://127.0.0.1:8000", "https://[::1]:99999", "line 3: backends[b].url: port 99999 does not exist; write 1 to 65535, as in https://[::1]:8000"},
		{"http://127.0.0.1:8000", "http://host:80/a b", `line 3: backends[b].url: "http://host:80/a b" has a space in it; remove it`},
		{"http://127.0.0.1:8000", "http://u:p@host:80", "line 3: backends[b].url: the user and password belong into no policy, which holds no secrets: put the key into api_key_env or api_key_file"},
		{"http://127.0.0.1:8000", "http://host:80/?key=p", "line 3: backends[b].url: what is behind ? or # is not sent; remove it, and put a key into api_key_env or api_key_file"},
		{"http://127.0.0.1:8000\"", "http://host:80\", server_name: x", `line 3: backends[b].url: TLS files or a server name are set, and http:// is not encrypted: write https://`},
	} {
		text := careless(c.is, c.slip)
		if text == careless() {
			t.Fatalf("nothing was replaced by %s", c.slip)
		}
		if p, err := ParsePolicy([]byte(text)); p != nil || err == nil || !strings.HasPrefix(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got\n%v\nwant\n%s", c.slip, err, c.want)
		} else if strings.Contains(err.Error(), "u:p") || strings.Contains(err.Error(), "key=p") {
			t.Errorf("%s: a secret is said: %v", c.slip, err)
		}
		p, err := ParseInForce([]byte(text))
		if err != nil {
			t.Errorf("%s: in force: %v", c.slip, err)
			continue
		}
		if err := p.Validate(); err == nil {
			t.Errorf("%s: Validate takes it", c.slip)
		}
	}
	for _, c := range [...]struct{ is, fine string }{
		{"[tiny]", "[tiny, n]"},
		{"models: [m], s", "models: [m, small], s"},
		{"timeout: 60s", "timeout: 100ms"},
		{"timeout: 60s", "timeout: 0s"},
		{"tier: 1", "tier: 1000"},
		{"tier: 1", "tier: 0"},
		{"slots: 4", "slots: 1000000"},
		{"http://127.0.0.1:8000", "https://[fe80::1]:8000/base/"},
		{"http://127.0.0.1:8000", "http://host"},
		{"http://127.0.0.1:8000\"", "dns://host:8000\", server_name: x"},
	} {
		if _, err := ParsePolicy([]byte(careless(c.is, c.fine))); err != nil {
			t.Errorf("%s: %v", c.fine, err)
		}
	}
}
