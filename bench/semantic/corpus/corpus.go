// Package corpus holds two sets of questions to assistants, each with its intent: what people ask a bank (banking77,
// 77 intents) and what they ask an assistant of 150 tasks (clinc150). Benchmarks and tests of the semantic cache take
// questions of the same intent to have the same answer.
//
// The files are the publishers' own, packed with gzip and not changed otherwise. banking77: Casanueva, Temčinas, Gerz, Henderson, Vulić,
// "Efficient Intent Detection with Dual Sentence Encoders" (2020), PolyAI, CC BY 4.0. clinc150: Larson and others, "An
// Evaluation Dataset for Intent Classification and Out-of-Scope Prediction" (2019), CC BY 3.0. Their licences lie beside them.
package corpus

import (
	"compress/gzip"
	"embed"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
)

//go:embed data
var files embed.FS

// Prompt is a question and what it is about.
type Prompt struct{ Text, Intent string }

// Names of the sets.
const (
	Banking77 = "banking77"
	CLINC150  = "clinc150"
)

// Sets are the names of the sets.
func Sets() []string { return []string{Banking77, CLINC150} }

// Splits are the publishers' parts of a set, and of clinc150 the questions that have none of the 150 intents ("oos_…"),
// which have nothing in common but their label.
func Splits(set string) []string {
	switch set {
	case Banking77:
		return []string{"train", "test"}
	case CLINC150:
		return []string{"train", "val", "test", "oos_train", "oos_val", "oos_test"}
	}
	return nil
}

// Load is one part of a set, in the publishers' order: banking77 10,003 (train) and 3,080 (test), clinc150 15,000,
// 3,000 (val) and 4,500. An error names a part that does not exist.
func Load(set, split string) ([]Prompt, error) {
	var all []Prompt
	var err error
	switch set {
	case Banking77:
		all, err = banking(split)
	case CLINC150:
		all, err = clinc(split)
	default:
		return nil, fmt.Errorf("corpus: no set %q: there are %v", set, Sets())
	}
	if err != nil {
		return nil, fmt.Errorf("corpus: %s: split %q: %w", set, split, err)
	}
	return all, nil
}

// unpack reads one file of the package.
func unpack(name string, read func(io.Reader) error) error {
	f, err := files.Open("data/" + name)
	if err != nil {
		return err
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	if err := read(z); err != nil {
		return err
	}
	return z.Close()
}

func banking(split string) (all []Prompt, err error) {
	err = unpack("banking77."+split+".csv.gz", func(r io.Reader) error {
		rows, err := csv.NewReader(r).ReadAll()
		if err != nil {
			return err
		}
		for _, row := range rows[1:] { // below the heads
			all = append(all, Prompt{row[0], row[1]})
		}
		return nil
	})
	return all, err
}

func clinc(split string) ([]Prompt, error) {
	var splits map[string][][2]string
	if err := unpack("clinc150.json.gz", func(r io.Reader) error { return json.NewDecoder(r).Decode(&splits) }); err != nil {
		return nil, err
	}
	rows, there := splits[split]
	if !there {
		return nil, fmt.Errorf("there are %v", Splits(CLINC150))
	}
	all := make([]Prompt, len(rows))
	for i, row := range rows {
		all[i] = Prompt{row[0], row[1]}
	}
	return all, nil
}
