package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	benchcache "headgate/bench/cache"
	benchhnsw "headgate/bench/hnsw"
	benchsemantic "headgate/bench/semantic"
)

// Parts of bench cache beside those of the cache of answers.
const (
	meaningPart = "meaning"
	vectorsPart = "vectors"
)

// cacheFlags are those of bench cache.
type cacheFlags struct {
	out     string
	only    []string
	quick   bool
	answers benchcache.Config
	meaning benchsemantic.Config
	vectors benchhnsw.Config
}

// cacheBenchCommand measures the caches: of answers, by meaning, and the search of vectors below.
func cacheBenchCommand() *cobra.Command {
	var f cacheFlags
	c := &cobra.Command{
		Use: "cache", Short: "Measure the caches: what hits cost, hit ratios, wrong hits, and the search of vectors", Args: exactly(0),
		Long: "Measure the cache of answers beside other caches of the same bytes and a handler that only writes them (hits, speed, memory,\n" +
			"ratio, crowd, misses); the semantic cache on two published sets of questions: hits against wrong hits (meaning); and the search\n" +
			"of vectors beside hnswlib, where g++ and libhnswlib-dev are installed: recall against time (vectors).",
		Example: "  headgate bench cache --quick\n" +
			"  headgate bench cache --out results\n" +
			"  headgate bench cache --only ratio,meaning\n" +
			"  headgate bench cache --only vectors --vectors 100000",
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c) },
	}
	s := c.Flags()
	s.StringVar(&f.out, "out", "", "folder for cache.txt, semantic.txt, .csv, .svg and hnsw.txt, and for data while it is measured")
	s.BoolVar(&f.quick, "quick", false, "a minute of it: whether it works, not how well")
	s.StringSliceVar(&f.only, "only", nil, "parts to measure: "+strings.Join(cacheParts(), ", ")+" (default all)")
	s.IntVar(&f.answers.Rounds, "rounds", 0, "rounds of answers and of searches, of which the median counts (default 5)")
	s.DurationVar(&f.answers.Each, "each", 0, "length of one measurement of hits (default 2s)")
	s.IntVar(&f.answers.Reads, "reads", 0, "reads of a trace (default 2000000)")
	s.IntVar(&f.answers.Keys, "keys", 0, "keys of a trace (default 200000)")
	s.IntVar(&f.answers.Entries, "entries", 0, "entries whose memory is weighed (default 50000)")
	s.IntVar(&f.answers.Nodes, "nodes", 0, "nodes of the cluster (default 5)")
	s.IntVar(&f.answers.Crowd, "crowd", 0, "requests at once for the same (default 1000)")
	s.IntVar(&f.answers.Misses, "misses", 0, "misses of each kind (default 400)")
	s.StringVar(&f.answers.Kind, "kind", "", "of hits, those kinds whose name holds this, such as stream")
	s.StringVar(&f.answers.Profile, "profile", "", "folder for CPU profiles of the node that serves hits; its figures are then worth less")
	s.IntVar(&f.meaning.Questions, "questions", 0, "questions of a replay (default 3000)")
	s.IntVar(&f.meaning.Seeds, "seeds", 0, "replays of each set of questions, in other orders (default 10)")
	s.StringVar(&f.meaning.URL, "embedder", "", "server of embeddings to ask instead of the built-in model, such as http://127.0.0.1:8000")
	s.StringVar(&f.meaning.Model, "embedder-model", "", "its model")
	s.IntVar(&f.vectors.N, "vectors", 0, "vectors to search (default 20000)")
	s.IntVar(&f.vectors.Builds, "builds", 0, "builds of an index, of which the median counts (default 3)")
	s.IntVar(&f.vectors.M, "links", 0, "links of a new vector (default 16)")
	s.IntVar(&f.vectors.EfConstruction, "candidates", 0, "candidates for links (default 200)")
	s.BoolVar(&f.vectors.Questions, "of-questions", false, "search the published questions, embedded, which takes a minute, instead of clusters that are drawn")
	s.StringVar(&f.vectors.File, "of-file", "", "search the vectors of a file: float32, little-endian, --dim in a row")
	s.IntVar(&f.vectors.Dim, "dim", 0, "numbers of a vector that is drawn or of a file (default 384)")
	return c
}

// cacheParts are the names of all that bench cache can measure.
func cacheParts() []string { return append(benchcache.Parts(), meaningPart, vectorsPart) }

func (f *cacheFlags) run(c *cobra.Command) error {
	meaning, vectors := len(f.only) == 0, len(f.only) == 0
	for _, name := range f.only {
		switch {
		case name == meaningPart:
			meaning = true
		case name == vectorsPart:
			vectors = true
		case slices.Contains(benchcache.Parts(), name):
			f.answers.Only = append(f.answers.Only, name)
		default:
			return usageError{fmt.Errorf("--only %q: there are %s", name, strings.Join(cacheParts(), ", "))}
		}
	}
	f.answers.Quick, f.meaning.Quick, f.vectors.Quick = f.quick, f.quick, f.quick
	f.answers.Log, f.meaning.Log, f.vectors.Log = c.ErrOrStderr(), c.ErrOrStderr(), c.ErrOrStderr()
	f.vectors.Rounds = f.answers.Rounds
	if f.out != "" { // beside the results, so that the disk is a real one
		f.answers.Dir = filepath.Join(f.out, "tmp")
		defer func() { _ = os.Remove(f.answers.Dir) }() // kept if something else is in it
	}
	for _, v := range []interface{ Validate() error }{f.answers, f.meaning, f.vectors} {
		if err := v.Validate(); err != nil {
			return usageError{err}
		}
	}
	if len(f.only) == 0 || len(f.answers.Only) > 0 {
		report, err := benchcache.Run(c.Context(), f.answers)
		if err != nil {
			return err
		}
		if err := f.put(c, report.String(), report.Write); err != nil {
			return err
		}
	}
	if meaning {
		report, err := benchsemantic.Run(c.Context(), f.meaning)
		if err != nil {
			return err
		}
		if err := f.put(c, report.String(), report.Write); err != nil {
			return err
		}
	}
	if vectors {
		report, err := benchhnsw.Run(c.Context(), f.vectors)
		if err != nil {
			return err
		}
		return f.put(c, report.String(), report.Write)
	}
	return nil
}

// put prints a report, and writes it where there is a folder for it.
func (f *cacheFlags) put(c *cobra.Command, text string, write func(dir string) error) error {
	if f.out != "" {
		if err := write(f.out); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(c.OutOrStdout(), "%s\n", text)
	return err
}
