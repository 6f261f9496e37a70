package lease

import (
	"bytes"
	"strings"
	"testing"
)

// TestTroubles: a quick run has one cell a fault; the report keeps them out of what it says of undisturbed cells, and has each fault's
// figures and time line.
func TestTroubles(t *testing.T) {
	r, err := Run(t.Context(), Config{Quick: true, Limits: []string{"100 requests/s"}, Nodes: []int{4}, Loads: []float64{.9}, Policies: []string{asksEach}})
	if err != nil {
		t.Fatal(err)
	}
	rows := r.troubles()
	if want := 2 * len(Faults()[1:]); len(rows) != want {
		t.Fatalf("%d rows, not %d", len(rows), want)
	}
	for i, row := range rows {
		if row.Fault != Faults()[1+i/2] || row.First() != (i%2 == 0) || row.Span != 2 || row.Ours() != (i%2 == 1) || row.Cells != 1 {
			t.Errorf("row %d: %+v", i, row)
		}
	}
	for _, name := range r.names() {
		for _, x := range r.of(name) {
			if x.Fault != NoFault {
				t.Errorf("%s counts among those in which nothing fails", x.String())
			}
		}
		if len(r.of(name)) != len(r.simulated(name)) {
			t.Errorf("%s: the page has other cells than the text", name)
		}
	}
	var page, text, table bytes.Buffer
	for _, err := range []error{r.WriteHTML(&page), r.WriteText(&text), r.WriteCSV(&table)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range Faults()[1:] {
		for name, s := range map[string]string{"page": page.String(), "text": text.String(), "table": table.String()} {
			if !strings.Contains(s, string(f)) {
				t.Errorf("the %s says nothing of a %s", name, f)
			}
		}
	}
	if n := strings.Count(page.String(), `class="fault"`); n != len(rows) {
		t.Errorf("%d time lines, not %d", n, len(rows))
	}
}

// TestFaultsFilter: only the faults that are asked for are run, and one that there is not is refused.
func TestFaultsFilter(t *testing.T) {
	c := Config{Faults: []Fault{Join, NoFault}}
	joins, calm := 0, 0
	for _, cell := range c.cells() {
		switch cell.Fault {
		case Join:
			joins++
		case NoFault:
			calm++
		default:
			t.Errorf("%s", cell.String())
		}
	}
	if joins != len(Troubles())/len(Faults()[1:]) || calm != len(Grid()) {
		t.Errorf("%d joins and %d cells without a fault", joins, calm)
	}
	if err := (&Config{Faults: []Fault{"flood"}}).Validate(); err == nil || !strings.Contains(err.Error(), "owner crash") {
		t.Errorf("a flood is no fault here, and it says %v", err)
	}
}
