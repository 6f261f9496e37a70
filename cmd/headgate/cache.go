package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

func cacheCommand() *cobra.Command {
	return group("cache", "End kept answers, fill the cache ahead, and see what it does and why",
		invalidateCommand(), generationsCommand(), cacheStatsCommand(), explainKeyCommand(), warmCommand(), calibrateCommand(), wrongCommand(), recentCommand())
}

func invalidateCommand() *cobra.Command {
	var q struct {
		Tenant     string   `json:"tenant,omitempty"`
		Surface    string   `json:"surface,omitempty"`
		Tags       []string `json:"tags,omitempty"`
		Generation *uint64  `json:"generation,omitempty"`
		All        bool     `json:"all,omitempty"`
	}
	var generation uint64
	c := &cobra.Command{
		Use: "invalidate {[--tenant T] [--surface S] | [--tenant T] --tag A,B | --all}", Short: "End kept answers on every node, at once", Args: exactly(0),
		Long: "End the answers that are kept for a tenant, for a surface, for a surface of a tenant, for those that\n" +
			"were tagged so, or all there are. Every node goes by it within 250 ms; one that is cut off from the\n" +
			"cluster, as soon as it is back. Without tags a new generation of keys begins: the old one can be put\n" +
			"back with --generation, and with it the answers that are not too old by then. What ended by its tags\nis gone. It stands in the audit log.",
		Example: "  headgate cache invalidate --tenant acme --surface faq\n  headgate cache invalidate --tenant acme --tag doc-7,doc-9\n" +
			"  headgate cache invalidate --tenant acme --surface faq --generation 1\n  headgate cache invalidate --all",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&q.Tenant, "tenant", "", "answers to this tenant (default: to every tenant)")
	c.Flags().StringVar(&q.Surface, "surface", "", "answers of this surface (default: of every surface)")
	c.Flags().StringSliceVar(&q.Tags, "tag", nil, "answers that have one of these tags; may be given several times")
	c.Flags().Uint64Var(&generation, "generation", 0, "put back this generation, which was in force before, instead of a new one")
	c.Flags().BoolVar(&q.All, "all", false, "all there are")
	c.RunE = func(c *cobra.Command, _ []string) error {
		named := q.Tenant != "" || q.Surface != "" || len(q.Tags) > 0
		switch {
		case !named && !q.All:
			return usageError{errors.New("say whose answers end: --tenant, --surface or --tag; --all ends every one there is")}
		case named && q.All:
			return usageError{errors.New("--all is for every answer there is: leave it out, or the rest")}
		case c.Flags().Changed("generation"):
			q.Generation = &generation
		}
		for flag, empty := range map[string]bool{"tenant": q.Tenant == "", "surface": q.Surface == "", "tag": len(q.Tags) == 0 || slices.Contains(q.Tags, "")} {
			if empty && c.Flags().Changed(flag) { // by a variable of a script, most often: it would end more than is meant
				return usageError{fmt.Errorf("--%s is empty: leave it out, if that is what is meant", flag)}
			}
		}
		return send(c, a, http.MethodPost, "/admin/v1/cache/invalidate", q, func(w io.Writer, done admin.CacheInvalidated) {
			printInvalidated(w, &done, q.Tenant, q.Surface, q.Tags)
		})
	}
	return c
}

func printInvalidated(w io.Writer, done *admin.CacheInvalidated, tenant, surface string, tags []string) {
	defer warn(w, done.Warnings)
	what := generationOf(tenant, surface)
	switch {
	case len(tags) > 0 && tenant == "":
		fmt.Fprintf(w, "what was kept with %s is ended, for every tenant\n", strings.Join(tags, " or "))
	case len(tags) > 0:
		fmt.Fprintf(w, "what was kept with %s is ended, for tenant %s\n", strings.Join(tags, " or "), tenant)
	case done.Generation == done.Previous:
		fmt.Fprintf(w, "%s: generation %d is in force already\n", what, done.Generation)
	case done.Generation < done.Previous:
		fmt.Fprintf(w, "%s: generation %d is in force again, in place of %d\n", what, done.Generation, done.Previous)
	default:
		fmt.Fprintf(w, "%s: generation %d is in force; --generation %d puts back what was kept before\n", what, done.Generation, done.Previous)
	}
}

// generationOf names what a generation is of.
func generationOf(tenant, surface string) string {
	switch {
	case tenant == "" && surface == "":
		return "everything"
	case surface == "":
		return "tenant " + tenant
	case tenant == "":
		return "surface " + surface
	}
	return "surface " + surface + " of tenant " + tenant
}

func generationsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "generations", Short: "List the generations of keys that were ever raised, and to which they can be put back", Args: exactly(0),
		Example: "  headgate cache generations",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/cache/generations", nil, func(w io.Writer, list []admin.CacheGeneration) {
			fmt.Fprintln(w, "TENANT\tSURFACE\tGENERATION\tHIGHEST")
			for _, g := range list {
				fmt.Fprintf(w, "%s\t%s\t%d\t%d\n", orAll(g.Tenant), orAll(g.Surface), g.Now, g.Highest)
			}
		})
	}
	return c
}

func orAll(name string) string {
	if name == "" {
		return "(all)"
	}
	return name
}

func cacheStatsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "stats", Short: "Show what a node's cache holds, how often it answers, and what it saved", Args: exactly(0),
		Long: "Show the cache of the node that is asked, since it was started: what it holds, and for each tenant and\n" +
			"surface how many requests it answered of those that it could have. What was not cacheable is told by\nreason; headgate cache explain-key says more. Then the templates of prompts: how much of them is the same\n" +
			"from the start on, which is what a model's own cache can reuse, and how much of the input it did reuse.\n\n" +
			"Surfaces with a semantic cache have a table of their own. QUESTIONS, IN, SERVED, AUDITED, EXPLORED, MISSED,\n" +
			"SAME, OTHER, PROBES and REPORTED are of the node that is asked: SAME and OTHER are comparisons of the model's\n" +
			"answer with the kept one, by what they found, and PROBES questions that look made to be taken for others.\n" +
			"WRONG OF HITS, WRONG OF REQUESTS and STATE are of the whole cluster; headgate docs semantic has more.",
		Example: "  headgate cache stats\n  headgate cache stats --json",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/cache/stats", nil, printCacheStats)
	}
	return c
}

func printCacheStats(w io.Writer, s admin.CacheStats) {
	fmt.Fprintf(w, "node\t%s\nkept\t%d answers in %s of %s\n", s.Node, s.Store.Entries, byteSize(s.Store.Bytes), byteSize(s.Store.MaxBytes))
	fmt.Fprintf(w, "since start\t%d put, %d went to make room or were too old, %d were not taken for others that are asked for more, %d were too large\n",
		s.Store.Puts, s.Store.Evicted, s.Store.Rejected, s.Store.TooLarge)
	if !s.Hearing {
		fmt.Fprintln(w, "cut off\tit does not hear of invalidations")
	}
	if len(s.Surfaces) > 0 {
		fmt.Fprintln(w, "\nTENANT\tSURFACE\tEXACT\tSEMANTIC\tLIVE\tSTALE\tPARTIAL\tMISSES\tHIT RATE\tLAST 10 MIN\tSAVED\tNOT KEPT\tNOT CACHEABLE\tALERTS")
	}
	for _, l := range s.Surfaces {
		recent := ""
		if l.RecentOf > 0 {
			recent = fmt.Sprintf("%.1f%% of %d", 100*l.Recent, l.RecentOf)
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%.1f%%\t%s\t%s\t%s\t%s\t%s\n", l.Tenant, l.Surface, l.Exact, l.Semantic, l.Live, l.Stale, l.Partial, l.Misses, 100*l.HitRate, recent,
			usd(l.Saved), reasons(l.Unkept), reasons(l.Uncacheable), strings.Join(l.Alerts, ", "))
	}
	printSemantic(w, s.Semantic)
	if len(s.Templates) > 0 {
		fmt.Fprintln(w, "\nTENANT\tSURFACE\tTEMPLATE\tMODEL\tREQUESTS\tMEAN PROMPT\tSAME START\tREAD FROM CACHE\tFINDING")
	}
	for _, p := range s.Templates {
		finding := p.Finding
		if p.Text != "" {
			finding += ": " + p.Text
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%.1f%%\t%s\n", p.Tenant, p.Surface, p.Template, p.Model, p.Requests, mean(p.Prompt), mean(p.Prefix), 100*p.Share, printable(finding))
	}
}

// mean is a size of prompts; there is none where too few were looked at.
func mean(bytes int64) string {
	if bytes == 0 {
		return "-"
	}
	return byteSize(bytes)
}

// maxReason bounds what is shown of why requests were not cacheable, in bytes.
const maxReason = 40

// reasons are why requests were not cacheable, the commonest first.
func reasons(counts map[string]int64) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), strings.Compare(a, b))
	})
	for i, name := range names {
		names[i] = strconv.FormatInt(counts[name], 10) + " " + name
		if len(name) > maxReason {
			names[i] = strings.ToValidUTF8(names[i][:len(names[i])-len(name)+maxReason], "") + "…"
		}
	}
	return strings.Join(names, ", ")
}

// byteSize is a size for people.
func byteSize(n int64) string {
	for _, unit := range [...]struct {
		of   int64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= unit.of {
			return strconv.FormatFloat(float64(n)/float64(unit.of), 'f', 1, 64) + " " + unit.name
		}
	}
	return strconv.FormatInt(n, 10) + " B"
}

// savedRequest is a request in a file: its body alone, or an object with the body among its members.
type savedRequest struct {
	Path    string                `json:"path"` // with its parameters, if any
	Headers map[string]headerText `json:"headers"`
	User    string                `json:"user"`
	Surface string                `json:"surface"`
	Body    json.RawMessage       `json:"body"`
}

// headerText is one value of a header, or a list of them.
type headerText []string

// UnmarshalJSON reads a string, or a list of some.
func (h *headerText) UnmarshalJSON(raw []byte) error {
	var one string
	if err := json.Unmarshal(raw, &one); err == nil {
		*h = headerText{one}
		return nil
	}
	var several []string
	if err := json.Unmarshal(raw, &several); err != nil {
		return errors.New("a header is a string or a list of strings")
	}
	*h = several
	return nil
}

// readSaved reads either. What has a body within is no body itself: none of a model's has one.
func readSaved(raw []byte) (s savedRequest, err error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return s, fmt.Errorf("it is no JSON object: %w", err)
	}
	if _, ok := members["body"]; !ok {
		s.Body = raw
		return s, nil
	}
	d := json.NewDecoder(strings.NewReader(string(raw)))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return s, fmt.Errorf("beside the body there may be path, headers, user and surface: %w", err)
	}
	if !strings.HasPrefix(string(s.Body), "{") {
		return s, errors.New("its body is no JSON object")
	}
	return s, nil
}

// maxSaved bounds a file with one request, in bytes.
const maxSaved = 8 << 20

// readSavedFile reads a file with one request; - is the standard input.
func readSavedFile(c *cobra.Command, flag, path string) (savedRequest, error) {
	in := c.InOrStdin()
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return savedRequest{}, usageError{fmt.Errorf("%s: %w", flag, err)}
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	raw, err := io.ReadAll(io.LimitReader(in, maxSaved+1))
	switch {
	case err != nil:
		return savedRequest{}, fmt.Errorf("%s: %w", flag, err)
	case len(raw) > maxSaved:
		return savedRequest{}, usageError{fmt.Errorf("%s: %s is larger than %s", flag, path, byteSize(maxSaved))}
	}
	s, err := readSaved(raw)
	if err != nil {
		return s, usageError{fmt.Errorf("%s: %s: %w", flag, path, err)}
	}
	return s, nil
}

// request as the admin API takes it.
func (s *savedRequest) request() admin.CacheRequest {
	q := admin.CacheRequest{User: s.User, Surface: s.Surface, Body: s.Body}
	q.Path, q.Query, _ = strings.Cut(s.Path, "?")
	if s.Headers != nil {
		q.Headers = map[string][]string{}
	}
	for name, values := range s.Headers {
		q.Headers[name] = values
	}
	return q
}

func explainKeyCommand() *cobra.Command {
	var file, against, tenant, key string
	var over savedRequest // what flags say goes before the file
	var headers []string
	c := &cobra.Command{
		Use: "explain-key -f FILE [--against FILE]", Short: "Say whether answers to a request are kept, under which key, and in what two requests differ", Args: exactly(0),
		Long: "Say what the cache makes of a request: whether answers to it are kept, and else why not; what goes into\n" +
			"the key of its answer, and what does not; whether one is kept on the node that is asked. With --against,\n" +
			"where a second request differs from it in what counts. On a surface with a semantic cache, also whether it is\n" +
			"compared with questions in other words, and with --against how similar the two are, which guards refuse\n" +
			"them, and whether one would get the other's answer. No model is asked but the surface's embedder, nothing\nis charged, and no answer is shown.\n\n" +
			"A file holds the request's body, or an object with body, and path, headers, user and surface as need be.\n" +
			"What the second leaves out is as in the first. - is the standard input.",
		Example: "  headgate cache explain-key -f request.json --tenant acme --surface faq\n" +
			"  headgate cache explain-key -f request.json --against other.json --tenant acme --surface faq --user ada",
	}
	a := adminFlags(c)
	c.Flags().StringVarP(&file, "file", "f", "", "file with the request")
	c.Flags().StringVar(&against, "against", "", "file with another one, to be compared")
	c.Flags().StringVar(&tenant, "tenant", "", "tenant of the key (default: any)")
	c.Flags().StringVar(&key, "key", "", "id of the key that the request comes with (default: any of the tenant's)")
	savedFlags(c, &over, "of the request (default: the file's, or the key's")
	c.Flags().StringVar(&over.Path, "path", "", "path of the request (default: the file's, or "+admin.DefaultCachePath+")")
	c.Flags().StringArrayVar(&headers, "header", nil, "a header of the request, 'Name: value'; may be given several times")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if file == "" {
			return usageError{errors.New("name the file with the request: headgate cache explain-key -f request.json")}
		}
		first, err := readSavedFile(c, "--file", file)
		if err != nil {
			return err
		}
		if err := first.override(&over, headers); err != nil {
			return err
		}
		q := admin.CacheQuestion{CacheRequest: first.request()}
		q.Tenant, q.Key = tenant, key
		if against != "" {
			second, err := readSavedFile(c, "--against", against)
			if err != nil {
				return err
			}
			other := second.request()
			q.Other = &other
		}
		return send(c, a, http.MethodPost, "/admin/v1/cache/explain-key", q, printKey)
	}
	return c
}

// savedFlags are those of what may stand in a request's file; of is whose, and what if they are not given.
func savedFlags(c *cobra.Command, s *savedRequest, of string) {
	c.Flags().StringVar(&s.User, "user", "", "user "+of+")")
	c.Flags().StringVar(&s.Surface, "surface", "", "surface "+of+" only one)")
}

// override puts what flags say in place of what the file does.
func (s *savedRequest) override(by *savedRequest, headers []string) error {
	for _, f := range [...]struct {
		to   *string
		from string
	}{{&s.Path, by.Path}, {&s.User, by.User}, {&s.Surface, by.Surface}} {
		if f.from != "" {
			*f.to = f.from
		}
	}
	for _, line := range headers {
		name, value, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(name) == "" {
			return usageError{fmt.Errorf("--header: %q is not as in 'Name: value'", line)}
		}
		if s.Headers == nil {
			s.Headers = map[string]headerText{}
		}
		s.Headers[strings.TrimSpace(name)] = append(s.Headers[strings.TrimSpace(name)], strings.TrimSpace(value))
	}
	return nil
}

// printKey says yes or no, and then why.
func printKey(w io.Writer, e admin.CacheExplanation) {
	printVerdict(w, "", &e.CacheVerdict)
	if e.Other != nil {
		printVerdict(w, "the other: ", e.Other)
		printPair(w, e.Pair)
		if len(e.Differences) == 0 {
			fmt.Fprintln(w, "they differ in nothing that counts")
			return
		}
		fmt.Fprintln(w, "\nDIFFERS IN\tFIRST\tOTHER")
		for _, d := range e.Differences {
			fmt.Fprintf(w, "%s\t%s\t%s\n", printable(d.Path), printable(d.First), printable(d.Second))
		}
		return
	}
	if len(e.Parts) > 0 {
		fmt.Fprintln(w, "\nPART\tCOUNTS\tHASH\tVALUE")
	}
	for _, p := range e.Parts {
		counts := "yes"
		if !p.Counted {
			counts = "no"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", printable(p.Name), counts, p.Hash, printable(p.Value))
	}
}

// printVerdict of one request.
func printVerdict(w io.Writer, of string, v *admin.CacheVerdict) {
	fmt.Fprintf(w, "%sas key %s of tenant %s\n", of, v.AsKey, v.AsTenant)
	if !v.Cacheable {
		fmt.Fprintf(w, "%snot kept: %s\n", of, v.Why)
		return
	}
	fmt.Fprintf(w, "%sanswers of %s are kept, key %s\n", of, v.Model, v.Key)
	switch {
	case v.Inputs > 0:
		fmt.Fprintf(w, "%sinput by input: this node keeps %d of %d\n", of, v.InputsKept, v.Inputs)
	case v.Kept == nil:
		fmt.Fprintf(w, "%sthis node keeps none\n", of)
	case v.Kept.Stale:
		fmt.Fprintf(w, "%sthis node keeps one of %s ago, which is stale\n", of, time.Duration(v.Kept.AgeSeconds)*time.Second)
	default:
		fmt.Fprintf(w, "%sthis node keeps one of %s ago\n", of, time.Duration(v.Kept.AgeSeconds)*time.Second)
	}
	printCompared(w, of, v)
}
