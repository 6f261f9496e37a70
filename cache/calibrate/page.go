package calibrate

import (
	_ "embed"
	"html/template"
	"io"
	"strconv"
	"strings"
)

//go:embed page.html
var pageSource string

// page is what the template is filled with.
type page struct {
	*Report
	Style                template.CSS
	Overlap, Errors, ROC template.HTML
	Verdict, Labels      string
	Left                 string // out
	Steps                []step
	Tables               []table
	Serves               bool // a threshold is recommended
}

// step is a row of the table of thresholds.
type step struct {
	Point
	Recommended bool
}

// table of examples.
type table struct {
	Title, Text string
	Rows        []Example
}

// WritePage writes the report as one HTML file that needs nothing else: no script, no network.
func (r *Report) WritePage(w io.Writer) error {
	t, err := template.New("page").Funcs(template.FuncMap{
		"percent": percent, "tenths": tenths, "share": share, "count": thousands, "plural": plural, "decimal": decimal,
		"lines": func(c Cross) string { return ints(c.Lines) },
	}).Parse(pageSource)
	if err != nil {
		return err
	}
	return t.Execute(w, &page{
		Report:  r,
		Style:   template.CSS(chartColours + chartStyle),
		Overlap: template.HTML(svg(chartWidth, overlapHeight, "How alike pairs of questions are, without guards and with them", "", r.overlap())),
		Errors:  template.HTML(svg(chartWidth, errorsHeight, "Wrong hits per hit, and pairs that hit, over the threshold", "", r.errors())),
		ROC:     template.HTML(svg(rocSize, rocSize, "Pairs with one answer that hit, over those with different answers", "", r.roc())),
		Verdict: r.verdict(), Labels: r.Noise.sentence(), Left: r.leftOut(),
		Steps: r.steps(), Tables: r.tables(),
		Serves: r.Recommendation.Outcome == Confirmed || r.Recommendation.Outcome == Likely,
	})
}

// steps are some thresholds of the curve, and the recommended one among them.
func (r *Report) steps() (rows []step) {
	for i := range r.chosen {
		p := &r.chosen[i]
		recommended := p.Threshold == r.Recommendation.Threshold
		if at := i + leastThreshold; recommended || at >= 600 && at%50 == 0 && at < mostThreshold || at == 975 {
			rows = append(rows, step{*p, recommended})
		}
	}
	return rows
}

// tables of examples that there are.
func (r *Report) tables() (out []table) {
	for _, t := range []table{
		{"Different answers, and nothing stops them", "The most alike pairs that are labelled different and that no guard refuses. Each sets a floor under the threshold: look whether the label is right.", r.Worst.Served},
		{"Different answers, stopped by guards", "The most alike pairs that are labelled different and that a guard refuses. No threshold alone would have kept them apart.", r.Worst.Stopped},
		{"One answer, refused by guards", "What the guards cost: pairs labelled the same that they refuse, the most alike first. These questions are asked of the model.", r.Worst.Price},
		{"One answer, and least alike", "Pairs labelled the same that no guard refuses, and that the embedder finds least alike: hits that no safe threshold can have.", r.Worst.Missed},
	} {
		if len(t.Rows) > 0 {
			out = append(out, t)
		}
	}
	return out
}

func ints(list []int) string {
	var parts []string
	for _, n := range list {
		parts = append(parts, strconv.Itoa(n))
	}
	return strings.Join(parts, ", ")
}
