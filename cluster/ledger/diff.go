package ledger

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Change is one difference between two policies.
type Change struct {
	Path string `json:"path"`
	Old  string `json:"old,omitempty"` // "": added
	New  string `json:"new,omitempty"` // "": removed
}

func (c Change) String() string {
	switch {
	case c.Old == "":
		return fmt.Sprintf("+ %s: %s", c.Path, c.New)
	case c.New == "":
		return fmt.Sprintf("- %s: %s", c.Path, c.Old)
	}
	return fmt.Sprintf("~ %s: %s -> %s", c.Path, c.Old, c.New)
}

// Diff lists what changes from old to new, in the order of the paths. Entries of lists
// are matched by name (keys by id), so that moving one is no change, but for routes, of which the first counts. Of hashes it shows the
// first digits only. A budget, a cache, a rung of the ladder, a route or the like that is added or removed is one line
// in words; of one that is changed it shows what changes.
func Diff(old, new *Policy) []Change {
	a, b := map[string]string{}, map[string]string{}
	flatten("", reflect.ValueOf(*old), a)
	flatten("", reflect.ValueOf(*new), b)
	for _, side := range [...]struct {
		p, other *Policy
		out      map[string]string
	}{{old, new, a}, {new, old, b}} {
		inWords(side.p.budgetsByPath(), side.other.budgetsByPath(), (*Budget).words, side.out)
		inWords(side.p.cachesByPath(), side.other.cachesByPath(), (*Surface).words, side.out)
		inWords(side.p.semanticsByPath(), side.other.semanticsByPath(), (*Surface).semanticWords, side.out)
		inWords(side.p.learntByPath(), side.other.learntByPath(), (*Backend).learnWords, side.out)
		inWords(side.p.capacityByPath(), side.other.capacityByPath(), (*Capacity).words, side.out)
		inWords(side.p.ladderByPath(), side.other.ladderByPath(), (*LadderRung).words, side.out)
		inWords(side.p.routesByPath(), side.other.routesByPath(), (*Route).words, side.out)
	}
	var out []Change
	for path, v := range a {
		if b[path] != v {
			out = append(out, Change{path, v, b[path]})
		}
	}
	for path, v := range b {
		if _, ok := a[path]; !ok {
			out = append(out, Change{path, "", v})
		}
	}
	if x, y := old.routesAlso(new), new.routesAlso(old); x != y {
		out = append(out, Change{"routes", x, y})
	}
	for i := range out {
		if strings.HasSuffix(out[i].Path, "].hash") {
			out[i].Old, out[i].New = redact(out[i].Old), redact(out[i].New)
		}
	}
	slices.SortFunc(out, func(x, y Change) int { return strings.Compare(x.Path, y.Path) })
	return out
}

// inWords replaces the fields of what is here and not there by one line each; out has the policy of here, flattened.
func inWords[T any](here, there map[string]T, words func(T) string, out map[string]string) {
	for path, v := range here {
		if _, ok := there[path]; ok {
			continue
		}
		for field := range out {
			if strings.HasPrefix(field, path+".") {
				delete(out, field)
			}
		}
		out[path] = words(v)
	}
}

// budgetsByPath are all budgets, by the path that differences and problems call them by.
func (p *Policy) budgetsByPath() map[string]*Budget {
	out := map[string]*Budget{}
	for i := range p.Plans {
		for j := range p.Plans[i].Budgets {
			b := &p.Plans[i].Budgets[j]
			out["plans["+p.Plans[i].Name+"].budgets["+b.Name+"]"] = b
		}
	}
	for i := range p.Global.Budgets {
		b := &p.Global.Budgets[i]
		out["global.budgets["+b.Name+"]"] = b
	}
	return out
}

// flatten writes every set leaf of v under its path. Zero values count as unset.
func flatten(path string, v reflect.Value, out map[string]string) {
	if v.IsZero() {
		return
	}
	if s, ok := reflect.TypeAssert[fmt.Stringer](v); ok {
		out[path] = s.String()
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		if e := v.Elem(); e.Kind() == reflect.Slice && e.Len() == 0 { // which says another thing than to leave it out
			out[path] = "[]"
		}
		flatten(path, v.Elem(), out)
	case reflect.Struct:
		for i := range v.NumField() {
			tag, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
			flatten(strings.TrimPrefix(path+"."+tag, "."), v.Field(i), out)
		}
	case reflect.Map:
		for it := v.MapRange(); it.Next(); {
			flatten(path+"["+it.Key().String()+"]", it.Value(), out)
		}
	case reflect.Slice:
		for i := range v.Len() {
			item := v.Index(i)
			name := fmt.Sprint(i)
			if item.Kind() == reflect.Struct {
				for _, id := range [...]string{"Rung", "Name", "ID"} {
					if f := item.FieldByName(id); f.IsValid() && (id == "ID" || !item.FieldByName("ID").IsValid()) {
						name = f.String()
					}
				}
			}
			flatten(path+"["+name+"]", item, out)
		}
	default:
		out[path] = fmt.Sprint(v.Interface())
	}
}
