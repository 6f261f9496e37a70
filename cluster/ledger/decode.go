package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Bounds on what a policy may hold. The YAML library takes some three hundred bytes a
// token, its stack grows with nesting, and its time with the square of a mapping's size.
const (
	maxPolicySize = 16 << 20 // bytes
	maxMarks      = 1 << 20  // separators
	maxNesting    = 32       // collections within each other
	maxFields     = 64       // of one mapping; no type here has as many
	maxProblems   = 50       // reported at once
	maxMessage    = 512      // bytes of each
)

// Problem is one thing wrong with a policy.
type Problem struct {
	Line    int    `json:"line,omitempty"` // 0: unknown
	Path    string `json:"path,omitempty"` // such as plans[pro].limits[org-tokens].rate
	Message string `json:"message"`        // what is wrong and what to write instead
}

// Problems is everything found wrong, maxProblems at most.
type Problems []Problem

func (ps Problems) Error() string {
	var b strings.Builder
	for i, p := range ps {
		if i > 0 {
			b.WriteByte('\n')
		}
		if p.Line > 0 {
			fmt.Fprintf(&b, "line %d: ", p.Line)
		}
		if p.Path != "" {
			b.WriteString(p.Path + ": ")
		}
		b.WriteString(p.Message)
	}
	return b.String()
}

// ParsePolicy reads and validates a policy. Its error is of type Problems.
func ParsePolicy(text []byte) (*Policy, error) {
	return parsePolicy(text, func(p *Policy) []found { return append(p.check(), p.refusedAnew()...) })
}

// ParseInForce is ParsePolicy for the text of a policy that is in force, or was: what only a new policy is
// refused for, such as a price that is missing or a name that stands twice, has been accepted by an earlier release.
func ParseInForce(text []byte) (*Policy, error) { return parsePolicy(text, (*Policy).check) }

func parsePolicy(text []byte, check func(*Policy) []found) (*Policy, error) {
	file, problem := parseYAML(text)
	if problem != nil {
		return nil, Problems{*problem}
	}
	var p Policy
	d := decoder{}
	if len(file.Docs) == 1 && file.Docs[0].Body != nil { // an empty policy is checked like any other
		d.value(place{"", "$"}, file.Docs[0].Body, reflect.ValueOf(&p).Elem())
	}
	var out Problems
	for _, f := range append(d.found, d.unsaid(check(&p))...) {
		if len(out) == maxProblems {
			break
		}
		if f.Line == 0 {
			f.Line = lineOf(file, f.yamlPath)
		}
		out = append(out, f.Problem)
	}
	if out != nil {
		slices.SortStableFunc(out, func(a, b Problem) int { return a.Line - b.Line })
		return nil, out
	}
	return &p, nil
}

// OfBackend is a problem that a node has with the i-th backend of p, such as a file that is not there, worded as
// ParsePolicy words its own. text is what p was read from.
func (p *Policy) OfBackend(text []byte, i int, field, message string) Problem {
	at := place{"", "$"}.item("backends", i, p.Backends[i].Name).field(field)
	problem := Problem{Path: at.human, Message: clip(message)}
	if file, unreadable := parseYAML(text); unreadable == nil {
		problem.Line = lineOf(file, at.yaml)
	}
	return problem
}

// Validate says what is wrong with a policy that was not read by ParsePolicy. Its error
// is of type Problems.
func (p *Policy) Validate() error {
	var out Problems
	for _, f := range append(p.check(), p.refusedAnew()...) {
		out = append(out, f.Problem)
	}
	return out.err()
}

// err is nil where there are none.
func (ps Problems) err() error {
	if len(ps) == 0 {
		return nil
	}
	return ps
}

// parseYAML parses text if its size and shape are within bounds.
func parseYAML(text []byte) (file *ast.File, problem *Problem) {
	marks := 0
	for _, m := range [...]string{",", ":", "[", "]", "{", "}", "\n", "- ", "-\t"} {
		marks += bytes.Count(text, []byte(m))
	}
	if len(text) > maxPolicySize || marks > maxMarks {
		return nil, &Problem{Message: fmt.Sprintf("the policy is too large: %d bytes and %d separators, of %d and %d", len(text), marks, maxPolicySize, maxMarks)}
	}
	defer func() { // a parser's mistake is this file's misfortune, not the node's
		if r := recover(); r != nil {
			file, problem = nil, &Problem{Message: fmt.Sprintf("the YAML parser gave up: %v", r)}
		}
	}()
	tokens := lexer.Tokenize(string(text))
	if p := checkShape(tokens); p != nil {
		return nil, p
	}
	file, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey()) // found by decoder, with both lines
	var e yaml.Error
	switch {
	case errors.As(err, &e) && e.GetToken() != nil:
		return nil, &Problem{Line: e.GetToken().Position.Line, Message: e.GetMessage()}
	case err != nil:
		return nil, &Problem{Message: err.Error()}
	case len(file.Docs) > 1:
		return nil, &Problem{Message: "a policy is one YAML document; remove the other ones"}
	}
	return file, nil
}

// level is a collection that is open at a token.
type level struct {
	flow   bool
	column int // of a block collection
	keys   int
}

// checkShape refuses what a policy has no use for before the parser, which recurses,
// sees it: anchors, which make a small text large, tags, and deep or wide collections.
func checkShape(tokens token.Tokens) *Problem {
	var open []level
	block := func(column int) *level { // the collection whose entries begin at column
		for len(open) > 0 && !open[len(open)-1].flow && open[len(open)-1].column > column {
			open = open[:len(open)-1]
		}
		if len(open) == 0 || open[len(open)-1].flow || open[len(open)-1].column < column {
			open = append(open, level{column: column})
		}
		return &open[len(open)-1]
	}
	for _, t := range tokens {
		inFlow := len(open) > 0 && open[len(open)-1].flow
		switch t.Type {
		case token.AnchorType, token.AliasType, token.MergeKeyType, token.TagType, token.DirectiveType, token.MappingKeyType:
			return &Problem{Line: t.Position.Line, Message: fmt.Sprintf("anchors, aliases, merges, tags, directives and ? keys are not allowed, and %q is one; write the value out, or put it in quotes", t.Value)}
		case token.SequenceStartType, token.MappingStartType:
			open = append(open, level{flow: true})
		case token.SequenceEndType, token.MappingEndType:
			for len(open) > 0 && !open[len(open)-1].flow {
				open = open[:len(open)-1]
			}
			open = open[:max(len(open)-1, 0)]
		case token.SequenceEntryType:
			if !inFlow {
				block(t.Position.Column)
			}
		case token.MappingValueType:
			var l *level
			if inFlow {
				l = &open[len(open)-1]
			} else if t.Prev != nil {
				l = block(t.Prev.Position.Column)
			} else {
				l = block(t.Position.Column)
			}
			if l.keys++; l.keys > maxFields {
				return &Problem{Line: t.Position.Line, Message: fmt.Sprintf("a mapping has more than %d fields", maxFields)}
			}
		}
		if len(open) > maxNesting {
			return &Problem{Line: t.Position.Line, Message: fmt.Sprintf("collections are nested more than %d deep", maxNesting)}
		}
	}
	return nil
}

// decoder fills the policy's types from YAML, strictly, and goes on after a problem.
type decoder struct{ found []found }

func (d *decoder) add(at place, n ast.Node, format string, args ...any) {
	if len(d.found) < maxProblems {
		d.found = append(d.found, found{Problem{Line: n.GetToken().Position.Line, Path: at.human, Message: clip(fmt.Sprintf(format, args...))}, at.yaml})
	}
}

// clip keeps a message that quotes the policy from growing with it.
func clip(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxMessage], "") + "…"
}

// unsaid leaves out what follows from a value that could not be read.
func (d *decoder) unsaid(checked []found) []found {
	return slices.DeleteFunc(checked, func(c found) bool {
		return slices.ContainsFunc(d.found, func(f found) bool {
			return c.yamlPath == f.yamlPath || strings.HasPrefix(c.yamlPath, f.yamlPath+".") || strings.HasPrefix(c.yamlPath, f.yamlPath+"[")
		})
	})
}

// value decodes n into v. What is null, or a key without a value, is left as it is.
func (d *decoder) value(at place, n ast.Node, v reflect.Value) {
	if n.Type() == ast.NullType {
		return
	}
	if sp, ok := reflect.TypeAssert[scalarParser](v.Addr()); ok {
		if s, ok := d.scalar(at, n, "a plain value"); ok {
			if err := sp.parse(s); err != nil {
				d.add(at, n, "%v", err)
			}
		}
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(at, n, v.Elem())
	case reflect.Struct:
		d.mapping(at, n, v)
	case reflect.Slice:
		d.list(at, n, v)
	case reflect.Map:
		d.texts(at, n, v)
	case reflect.String:
		if s, ok := d.scalar(at, n, "text"); ok {
			v.SetString(s.text)
		}
	case reflect.Int, reflect.Int64:
		d.whole(at, n, v)
	case reflect.Bool:
		if b, ok := n.(*ast.BoolNode); ok {
			v.SetBool(b.Value)
		} else {
			d.add(at, n, "must be true or false")
		}
	}
}

// scalar gives the text of a plain value as it was written.
func (d *decoder) scalar(at place, n ast.Node, want string) (scalar, bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return scalar{text: n.Value}, true
	case *ast.LiteralNode:
		return scalar{text: n.Value.Value}, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		return scalar{text: n.GetToken().Value, number: true}, true
	case *ast.BoolNode:
		return scalar{text: n.GetToken().Value}, true
	}
	d.add(at, n, "must be %s and not a list or a mapping", want)
	return scalar{}, false
}

func (d *decoder) whole(at place, n ast.Node, v reflect.Value) {
	s, ok := d.scalar(at, n, "a whole number")
	if !ok {
		return
	}
	i, err := strconv.ParseInt(s.text, 10, v.Type().Bits())
	if err != nil || !s.number {
		d.add(at, n, "%q must be a whole number in plain digits, without quotes", s.text)
		return
	}
	v.SetInt(i)
}

func (d *decoder) list(at place, n ast.Node, v reflect.Value) {
	seq, ok := n.(*ast.SequenceNode)
	if !ok {
		d.add(at, n, "must be a list, as in [first, second]")
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), len(seq.Values), len(seq.Values)))
	for i, item := range seq.Values {
		d.value(at.nth(i, nameOf(item)), item, v.Index(i))
	}
}

// texts fills a map of texts by names, which are not a type's.
func (d *decoder) texts(at place, n ast.Node, v reflect.Value) {
	m, ok := n.(ast.MapNode)
	if !ok {
		d.add(at, n, "must be a mapping of names to texts, as in {name: text}")
		return
	}
	v.Set(reflect.MakeMap(v.Type()))
	lines := map[string]int{}
	for it := m.MapRange(); it.Next(); {
		key := it.Key()
		name, line := key.GetToken().Value, key.GetToken().Position.Line
		in := at.entry(name)
		switch {
		case lines[name] > 0:
			d.add(in, key, "%q stands here twice; the first is on line %d", clip(name), lines[name])
		case it.Value().Type() == ast.NullType:
			d.add(in, key, "there is nothing behind it; write a text, or remove it")
		default:
			if s, ok := d.scalar(in, it.Value(), "text"); ok {
				v.SetMapIndex(reflect.ValueOf(name), reflect.ValueOf(s.text))
			}
		}
		lines[name] = line
	}
}

// nameOf is by what the entry of a list is called in paths.
func nameOf(n ast.Node) string {
	m, ok := n.(ast.MapNode)
	if !ok {
		return ""
	}
	for it := m.MapRange(); it.Next(); {
		if k := it.Key().GetToken().Value; k == "name" || k == "id" || k == "rung" {
			if s, ok := it.Value().(*ast.StringNode); ok {
				return s.Value
			}
			return ""
		}
	}
	return ""
}

func (d *decoder) mapping(at place, n ast.Node, v reflect.Value) {
	m, ok := n.(ast.MapNode)
	if !ok {
		d.add(at, n, "must be a mapping of %s", strings.Join(fieldNames(v.Type()), ", "))
		return
	}
	names := fieldNames(v.Type())
	lines := make(map[string]int, len(names))
	for it := m.MapRange(); it.Next(); {
		key := it.Key()
		name, line := key.GetToken().Value, key.GetToken().Position.Line
		i := slices.Index(names, name)
		switch {
		case i < 0:
			d.add(at.field(name), key, "unknown field %q%s", name, unknown(v, name, names))
		case lines[name] > 0:
			d.add(at.field(name), key, "%q stands here twice; the first is on line %d", name, lines[name])
		default:
			if instead := mistaken(v, name, it.Value()); instead != "" {
				d.add(at.field(name), it.Value(), "%s", instead)
			} else {
				d.value(at.field(name), it.Value(), v.Field(i))
			}
		}
		lines[name] = line
	}
}

// misnamer is a type that knows by what names others call its fields: what to write instead, "" where it can't tell.
type misnamer interface{ misnamed(name string) string }

// unknown is the end of an error about a field that v does not have.
func unknown(v reflect.Value, name string, names []string) string {
	if m, ok := reflect.TypeAssert[misnamer](v.Addr()); ok {
		if instead := m.misnamed(name); instead != "" {
			return "; " + instead
		}
	}
	return didYouMean(name, names)
}

// mistaker is a type that knows what others write as the values of its fields, in plain values, "" for none: what to
// write instead, "" where it can't tell.
type mistaker interface {
	mistaken(field, value string) string
}

// mistaken is an error about the value of a field of v; "" where there is none.
func mistaken(v reflect.Value, field string, n ast.Node) string {
	m, ok := reflect.TypeAssert[mistaker](v.Addr())
	if !ok {
		return ""
	}
	switch n := n.(type) {
	case *ast.NullNode:
		return m.mistaken(field, "")
	case *ast.StringNode:
		return m.mistaken(field, n.Value)
	case *ast.IntegerNode, *ast.FloatNode, *ast.NanNode, *ast.InfinityNode:
		return m.mistaken(field, n.GetToken().Value)
	}
	return ""
}

// fieldNames are a struct's, in its order: every field has one.
func fieldNames(t reflect.Type) []string {
	names := make([]string, t.NumField())
	for i := range names {
		names[i], _, _ = strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
	}
	return names
}

// lineOf finds the line of a YAML path, or of the nearest of its parents that was written.
func lineOf(file *ast.File, path string) int {
	for path != "$" && path != "" {
		if p, err := yaml.PathString(path); err == nil {
			if n, err := p.FilterFile(file); err == nil && n != nil && n.GetToken() != nil {
				return n.GetToken().Position.Line
			}
		}
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
	}
	return 0
}

// maxNamed bounds the names that stand in an error.
const maxNamed = 9

// didYouMean is the end of an error about a name that is none of names: the one that was meant, or else
// which there are.
func didYouMean(name string, names []string) string {
	if hint := Hint(name, names); hint != "" {
		return hint
	}
	more := ""
	if len(names) > maxNamed {
		names, more = names[:maxNamed], ", …"
	}
	return "; there are " + strings.Join(names, ", ") + more
}

// Hint is the end of an error about a name that is none of names: which was meant, "" where none is near.
func Hint(name string, names []string) string { return hintOf(Nearest(name, names)) }

func hintOf(meant string) string {
	if meant == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", meant)
}

// Nearest is the candidate that somebody who wrote name may have meant: the one with the smallest edit
// distance, and "" where that is more than a third of the name.
func Nearest(name string, candidates []string) string {
	if name == "" {
		return ""
	}
	name = name[:min(len(name), 64)]
	best, least := "", max(1, (len(name)+1)/3)+1
	for _, c := range candidates {
		if d := editDistance(strings.ToLower(name), strings.ToLower(c)); d < least {
			best, least = c, d
		}
	}
	return best
}

// editDistance counts letters that are wrong, missing or too many, and neighbours that changed places,
// of short names.
func editDistance(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1) // by how much of b
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			wrong := last[j]
			if a[i] != b[j] {
				wrong++
			}
			row[j+1] = min(wrong, last[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
