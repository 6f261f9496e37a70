package trace

import (
	"embed"
	"errors"
	"fmt"
	"slices"
	"strings"
)

//go:embed samples
var files embed.FS

// Names of the samples.
const (
	AzureSample    = "azure"
	MooncakeSample = "mooncake"
)

// Samples are the names of the samples of real traces that are built in. samples/README.md says what they are and
// under which licences.
func Samples() []string { return []string{AzureSample, MooncakeSample} }

// Sample is one of them, as its publisher made it: not split into tenants. An error names what there is instead.
func Sample(name string) (t *Trace, err error) {
	path, format, source := "azure_llm_2023_conv.csv.gz", Azure,
		"the first 4,000 requests of the Azure LLM inference trace 2023, conversation service (Patel and others, Splitwise, ISCA 2024), Microsoft, CC BY 4.0"
	switch {
	case name == MooncakeSample:
		path, format, source = "mooncake_conversation.jsonl.gz", Mooncake,
			"the first 3,000 requests of Mooncake's conversation trace (Qin and others, FAST '25), Moonshot AI, Apache-2.0"
	case !slices.Contains(Samples(), name):
		return nil, fmt.Errorf("there is no sample %q: there are %s", name, strings.Join(Samples(), " and "))
	}
	f, err := files.Open("samples/" + path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if t, err = Read(f, format, Options{Name: name}); err != nil {
		return nil, err
	}
	t.Source = source
	return t, nil
}

// Load is the sample of that name or, where it is none, the file, as Open reads it: ./azure is a file.
func Load(name string, format Format, o Options) (*Trace, error) {
	if !slices.Contains(Samples(), name) {
		return Open(name, format, o)
	}
	t, err := Sample(name)
	if err == nil && o.First > 0 {
		t, err = t.Head(o.First)
	}
	return t, err
}
