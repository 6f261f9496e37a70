package corpus_test

import (
	"testing"

	"headgate/bench/semantic/corpus"
)

// TestLoad counts what the publishers say there is, and knows the first and the last of each file.
func TestLoad(t *testing.T) {
	for _, c := range []struct {
		set, split       string
		prompts, intents int
		first, last      corpus.Prompt
	}{
		{"banking77", "train", 10003, 77, corpus.Prompt{Text: "I am still waiting on my card?", Intent: "card_arrival"}, corpus.Prompt{Text: "Which countries are represented?", Intent: "country_support"}},
		{"banking77", "test", 3080, 77, corpus.Prompt{Text: "How do I locate my card?", Intent: "card_arrival"}, corpus.Prompt{Text: "Can the card be mailed and used in Europe?", Intent: "country_support"}},
		{"clinc150", "train", 15000, 150, corpus.Prompt{Text: "what expression would i use to say i love you if i were an italian", Intent: "translate"}, corpus.Prompt{Text: "why was my card declined at safeway", Intent: "card_declined"}},
		{"clinc150", "val", 3000, 150, corpus.Prompt{Text: "in spanish, meet me tomorrow is said how", Intent: "translate"}, corpus.Prompt{Text: "i was just at target and they declined my card and i can't understand why", Intent: "card_declined"}},
		{"clinc150", "test", 4500, 150, corpus.Prompt{Text: "how would you say fly in italian", Intent: "translate"}, corpus.Prompt{Text: "why didn't my card work", Intent: "card_declined"}},
	} {
		all, err := corpus.Load(c.set, c.split)
		if err != nil {
			t.Fatal(err)
		}
		intents := map[string]bool{}
		for _, p := range all {
			if p.Text == "" || p.Intent == "" {
				t.Fatalf("%s/%s: %+v", c.set, c.split, p)
			}
			intents[p.Intent] = true
		}
		if len(all) != c.prompts || len(intents) != c.intents || all[0] != c.first || all[len(all)-1] != c.last {
			t.Errorf("%s/%s: %d prompts of %d intents, from %+v to %+v", c.set, c.split, len(all), len(intents), all[0], all[len(all)-1])
		}
	}
}

func TestEverySplitIsThere(t *testing.T) {
	for _, set := range corpus.Sets() {
		for _, split := range corpus.Splits(set) {
			if all, err := corpus.Load(set, split); err != nil || len(all) == 0 {
				t.Errorf("%s/%s: %d, %v", set, split, len(all), err)
			}
		}
	}
	for _, none := range [...][2]string{{"trec", "train"}, {corpus.Banking77, "val"}, {corpus.CLINC150, "validation"}} {
		if _, err := corpus.Load(none[0], none[1]); err == nil {
			t.Errorf("%v is there", none)
		}
	}
}
