package guard

import (
	"math"
	"strconv"
	"strings"
)

// figure is a number, date or time that an answer states.
type figure struct {
	keys    [2]uint32 // what it counts: a kind of unit, or the words beside it; 0 for none
	kind    Kind
	text    string // where it is no number ("1.2.3"): its value
	num     float64
	unit    value   // of group 0 without one
	size    float64 // of its unit, 0 where it can't be converted
	segment uint16
	tok     uint16
	places  uint8 // decimals
	rough   bool  // "about"
	soft    bool  // supports others, contradicts none: "an hour"
	half    bool  // a time of the clock that may be before or after noon
	near    []uint32
}

// measures fills in what units are worth.
func (x *lexicon) measures() {
	x.sizes = make(map[value]float64, 64)
	for _, m := range [...]struct {
		unit string
		size float64
	}{
		{"millimetre", .001},
		{"centimetre", .01},
		{"metre", 1},
		{"kilometre", 1000},
		{"inch", .0254},
		{"foot", .3048},
		{"yard", .9144},
		{"mile", 1609.344},
		{"milligram", .001},
		{"gram", 1},
		{"kilogram", 1000},
		{"tonne", 1e6},
		{"ounce", 28.3495},
		{"lb", 453.592},
		{"microgram", 1e-6},
		{"millilitre", .001},
		{"centilitre", .01},
		{"litre", 1},
		{"gallon", 3.78541},
		{"pint", .473176},
		{"quart", .946353},
		{"nanosecond", 1e-9},
		{"microsecond", 1e-6},
		{"millisecond", .001},
		{"second", 1},
		{"minute", 60},
		{"hour", 3600},
		{"day", 86400},
		{"week", 7 * 86400},
		{"fortnight", 14 * 86400},
		{"month", 30.4375 * 86400},
		{"year", 365.25 * 86400},
		{"decade", 3652.5 * 86400},
		{"century", 36525 * 86400},
		{"byte", 1},
		{"kb", 1e3},
		{"mb", 1e6},
		{"gb", 1e9},
		{"tb", 1e12},
		{"pb", 1e15},
		{"mph", 1.609344},
		{"kmh", 1},
		{"watt", 1},
		{"kilowatt", 1e3},
		{"megawatt", 1e6},
		{"hertz", 1},
		{"khz", 1e3},
		{"mhz", 1e6},
		{"ghz", 1e9},
		{"kbps", 1e3},
		{"mbps", 1e6},
		{"gbps", 1e9},
		{"sqm", 1},
		{"hectare", 1e4},
		{"acre", 4046.86},
		{"square_foot", .092903},
		{"calorie", 1},
		{"kilojoule", .239},
	} {
		if lx := x.words[english][m.unit]; lx != nil {
			for _, v := range lx.vals {
				if x.groups[v.group].kind == KindUnit {
					x.sizes[value{group: v.group, val: v.val}] = m.size
				}
			}
		}
	}
}

// unit reads token i as a unit or currency. Its group is 0 where it is none.
func (t *Text) unit(x *lexicon, i int) value {
	tok := &t.tokens[i]
	lx := tok.lex
	if name := unitAbroad(tok.word); name != "" {
		lx = x.words[english][name]
	}
	if lx == nil && tok.flags&tCode != 0 {
		lx = x.words[english][tok.word] // "20 %"
	}
	if lx == nil {
		return value{}
	}
	for _, v := range lx.vals {
		if x.groups[v.group].kind == KindUnit {
			return value{group: v.group, val: v.val}
		}
	}
	return value{}
}

// unitAbroad is the English name of a unit in another language, or in short.
func unitAbroad(w string) string {
	switch w {
	case "m":
		return "metre"
	case "g":
		return "gram"
	case "l":
		return "litre"
	case "h", "std", "stunde", "stunden", "heure", "heures", "hora", "horas", "ora", "ore", "uur", "часов", "часа", "час", "小時", "घंटे":
		return "hour"
	case "s", "sekunde", "sekunden", "seconde", "secondes", "segundo", "segundos", "secondi", "seconden", "секунд", "秒":
		return "second"
	case "minuten", "minutos", "minuti", "minuten'", "минут", "минуты":
		return "minute"
	case "tag", "tage", "tagen", "werktage", "werktagen", "jour", "jours", "día", "días", "dia", "dias", "giorno", "giorni", "dag", "dagen", "дней", "дня", "день", "dagar", "dage", "dager", "天", "日", "दिन", "일":
		return "day"
	case "woche", "wochen", "semaine", "semaines", "semana", "semanas", "settimana", "settimane", "weken", "недель", "недели", "周", "週":
		return "week"
	case "monat", "monate", "monaten", "mois", "mes", "meses", "mese", "mesi", "maand", "maanden", "месяцев", "месяца", "月":
		return "month"
	case "jahr", "jahre", "jahren", "an", "ans", "année", "années", "año", "años", "anno", "anni", "ano", "anos", "jaar", "лет", "года", "год", "年":
		return "year"
	case "元":
		return "yuan"
	case "円":
		return "yen"
	case "руб", "рублей", "рубля":
		return "rouble"
	case "prozent", "procent", "процентов", "процента":
		return "percent"
	}
	return ""
}

// measure finds the figures of the sentences.
func (f *Facts) measure(x *lexicon) {
	for i := range f.segments {
		s := &f.segments[i]
		s.figures[0] = uint16(len(f.figures))
		for j := int(s.from); j < int(s.to) && len(f.figures) < maxFigures; j++ {
			j = f.figure(x, i, j)
		}
		s.figures[1] = uint16(len(f.figures))
		f.link(s)
	}
}

// link lets a number without a unit have that of the next: "5 to 7 days", "3 or 4 pm"; and
// adds up "2 hours and 25 minutes".
func (f *Facts) link(s *segment) {
	figs := f.figures[s.figures[0]:s.figures[1]]
	for i := len(figs) - 2; i >= 0; i-- {
		a, b := &figs[i], &figs[i+1]
		gap := int(b.tok) - int(a.tok)
		switch {
		case a.unit.group == 0 && a.kind == KindNumber && a.text == "" && gap <= 2 && b.text == "" && (gap < 2 || f.joins(int(a.tok)+1)) && a.num < b.num && b.kind == KindNumber:
			a.unit, a.size, a.keys = b.unit, b.size, b.keys
		case a.unit.group == 0 && a.kind == KindNumber && gap <= 2 && b.kind == KindDate && b.half && f.joins(int(a.tok)+1) && a.num <= 12:
			a.kind, a.num, a.keys, a.half = KindDate, a.num*60, b.keys, true
		}
	}
	for i := len(figs) - 2; i >= 0; i-- {
		a, b := &figs[i], &figs[i+1]
		if a.unit.group != 0 && a.unit.group == b.unit.group && a.size > b.size && b.size > 0 && a.size <= 86400 && int(b.tok)-int(a.tok) <= 3 && b.num < a.size/b.size {
			a.num, a.places, b.soft = a.num+b.num*b.size/a.size, 2, true
		}
	}
}

// joins reports whether token i parts the bounds of a range.
func (f *Facts) joins(i int) bool {
	switch f.text.tokens[i].word {
	case "to", "or", "and", "through", "until", "till", "-", "bis", "oder", "und", "à", "ou", "et", "a", "o", "y", "e", "tot", "до", "至", "到":
		return true
	}
	return false
}

// figure reads the figure at token j, if there is one, and returns the last token of it.
func (f *Facts) figure(x *lexicon, seg, j int) int {
	t := f.text
	tok := &t.tokens[j]
	fig := figure{segment: uint16(seg), tok: uint16(j), kind: KindNumber}
	if month := t.monthAt(x, j); month > 0 {
		return f.date(fig, j, month)
	}
	if tok.flags&tNumber == 0 {
		if unit := f.units[j]; unit.group > 0 && j > 0 && x.sizes[unit] >= 1 {
			if w := t.tokens[j-1].word; w == "a" || w == "an" || w == "one" || w == "ein" || w == "eine" || w == "einem" || w == "einer" || w == "une" || w == "un" || w == "una" {
				fig.num, fig.unit, fig.soft = 1, unit, w != "one"
				f.add(x, fig)
			}
		}
		return j
	}
	if j > 0 {
		switch t.tokens[j-1].word {
		case "step", "steps", "option", "tip", "schritt", "étape", "paso", "passo", "stap", "example", "method":
			return j
		}
	}
	fig.rough = f.roughly(j)
	if f.clock(fig, j) || f.numericDate(fig, j) {
		return j
	}
	word := tok.word
	if lo, hi, ok := strings.Cut(word, "-"); ok && lo != "" && len(lo) <= 4 && len(hi) <= 4 && !strings.Contains(hi, "-") {
		a, errA := strconv.ParseFloat(lo, 64)
		b, errB := strconv.ParseFloat(hi, 64)
		if errA == nil && errB == nil && a < b {
			end := f.counted(x, &fig, j)
			low := fig
			low.num, fig.num = a, b
			f.add(x, low)
			f.add(x, fig)
			return end
		}
	}
	n, places, ok := number(t.lang, word)
	if !ok {
		fig.text = word
	}
	fig.num, fig.places = n, places
	end := f.counted(x, &fig, j)
	f.add(x, fig)
	return end
}

// number reads what the scanner made of digits.
func number(l lang, w string) (n float64, places uint8, ok bool) {
	w = strings.TrimSuffix(w, "+")
	if i := strings.IndexByte(w, '.'); i > 0 && i <= 3 && len(w) == i+4 && l != english && w[0] != '0' {
		w = w[:i] + w[i+1:] // 1.000 is a thousand
	}
	n, err := strconv.ParseFloat(w, 64)
	if err != nil || math.IsInf(n, 0) || math.IsNaN(n) {
		return 0, 0, false
	}
	if i := strings.IndexByte(w, '.'); i >= 0 {
		places = uint8(min(len(w)-i-1, 15))
	}
	return n, places, true
}

// counted finds what the number at token j counts, and returns the last token of it.
func (f *Facts) counted(x *lexicon, fig *figure, j int) int {
	t := f.text
	end := j
	to := int(f.segments[fig.segment].to)
	next := j + 1
	for next < to && next <= j+4 {
		switch w := t.tokens[next].word; {
		case t.tokens[next].is(fNumber) || t.tokens[next].flags&tNumber != 0:
			m, _, ok := number(t.lang, t.tokens[next].word)
			if !ok || m != 1e3 && m != 1e6 && m != 1e9 || fig.num <= 0 || fig.num >= 1000 {
				f.beside(x, fig, j, end)
				return end
			}
			fig.num, fig.places = fig.num*m, 0
			end = next
		case w == "thousand" || w == "tausend" || w == "mille" || w == "mil":
			fig.num *= 1e3
		case w == "million" || w == "millions" || w == "millionen" || w == "millones" || w == "mio":
			fig.num *= 1e6
		case w == "billion" || w == "billions" || w == "milliarden" || w == "milliards":
			fig.num *= 1e9
		case w == "business" || w == "working" || w == "calendar" || w == "full" || w == "consecutive" || w == "more" || w == "additional" || w == "extra" ||
			w == "us" || w == "square" || w == "short" || w == "whole" || w == "个" || w == "個":
		default:
			if unit := f.units[next]; unit.group > 0 && (t.tokens[next].flags&tStart == 0 || t.tokens[next].flags&tJoined != 0) {
				fig.unit = unit
				return next
			}
			f.beside(x, fig, j, end)
			return end
		}
		if t.tokens[next].flags&tStart != 0 {
			break
		}
		next++
	}
	f.beside(x, fig, j, end)
	return end
}

// beside gives a number without a unit after it the currency before it, or the words
// around it for keys.
func (f *Facts) beside(x *lexicon, fig *figure, j, end int) {
	t := f.text
	from, to := int(f.segments[fig.segment].from), int(f.segments[fig.segment].to)
	if j > from {
		if unit := f.units[j-1]; unit.group > 0 && t.tokens[j-1].flags&tNumber == 0 && (j-1 == from || t.tokens[j-2].flags&tNumber == 0) && x.sizes[unit] == 0 {
			fig.unit = unit
			return
		}
	}
	if fig.text == "" && fig.places == 0 && fig.num >= 1000 && fig.num < 2200 && t.dated(j) {
		fig.keys[0] = hash("year", 'k')
		fig.kind = KindDate
		return
	}
	for k := end + 1; k < min(to, end+4); k++ {
		if t.tokens[k].flags&tStart != 0 {
			break
		}
		if id := t.named(k); id != 0 {
			fig.keys[0] = id
			break
		}
	}
	for k := j - 1; k >= max(from, j-4); k-- {
		if id := t.named(k); id != 0 {
			fig.keys[1] = id ^ 1
			break
		}
	}
}

// dated reports whether a number that may be a year stands where a year does.
func (t *Text) dated(j int) bool {
	if j == 0 {
		return false
	}
	prev := &t.tokens[j-1]
	switch prev.word {
	case "in", "since", "year", "from", "until", "till", "by", "of", "before", "after", "to", "and", "im", "seit", "jahr", "von", "bis", "en", "depuis", "desde", "de", "nel", "dal", "em", "sinds":
		return true
	case "around", "about", "circa", "ca":
		return j+1 == len(t.tokens) || t.tokens[j+1].flags&tStart != 0
	}
	return prev.flags&tNumber != 0 || t.tokens[j].flags&tStart != 0 || t.monthAt(loaded(), j-1) > 0
}

// named is the key of the word at token k, 0 where it names nothing.
func (t *Text) named(k int) uint32 {
	tok := &t.tokens[k]
	if tok.flags&(tNumber|tCode) != 0 || tok.is(fFunction|fNegation) {
		return 0
	}
	return hash(root(t.lang, tok.stem), 'k') &^ 1
}

func (f *Facts) roughly(j int) bool {
	for k := max(0, j-3); k < j; k++ {
		switch f.text.tokens[k].word {
		case "about", "approximately", "around", "roughly", "nearly", "almost", "circa", "ca", "over", "more_than", "more", "~", "etwa", "rund", "ungefähr", "fast", "über",
			"environ", "presque", "unos", "unas", "aproximadamente", "cerca", "circa.", "ongeveer", "около", "约", "some", "estimated", "close", "up", "just", "under":
			return true
		}
	}
	return false
}

// add keeps a figure, with its keys and the words around it.
func (f *Facts) add(x *lexicon, fig figure) {
	if len(f.figures) >= maxFigures {
		return
	}
	if fig.unit.group != 0 {
		fig.size = x.sizes[fig.unit]
		fig.keys = [2]uint32{hash("unit", byte(fig.unit.group)) ^ uint32(fig.unit.group)<<16, 0}
	}
	s := &f.segments[fig.segment]
	const window = 10
	fig.near = make([]uint32, 0, 2*window)
	from, to := max(int(s.from), int(fig.tok)-window), min(int(s.to), int(fig.tok)+window+2)
	for k := from; k < to; k++ {
		if id := f.content[k]; id != 0 && f.units[k].group == 0 {
			fig.near = append(fig.near, id)
		}
	}
	if len(fig.near) < 2 && fig.segment > 0 {
		before := f.segments[fig.segment-1].ids
		fig.near = append(fig.near, before[:min(len(before), 6)]...)
	}
	fig.near = sorted(fig.near)
	f.figures = append(f.figures, fig)
}

// same reports whether two figures of one key are equal, and what differs if not: "" where
// they can't be compared.
func (a *figure) same(b *figure) (bool, Kind) {
	if a.text != "" || b.text != "" {
		if a.text == b.text || a.text == "" || b.text == "" {
			return a.text == b.text, ""
		}
		return strings.HasPrefix(a.text, b.text+".") || strings.HasPrefix(b.text, a.text+"."), a.kind
	}
	if a.half || b.half {
		return math.Mod(a.num-b.num, 720) == 0, KindDate
	}
	x, y, rough := a.num, b.num, .002
	if a.kind == KindDate || a.unit.group == 0 && a.num < 100 {
		rough = 0
	}
	switch {
	case !a.rough && !b.rough:
	case a.kind == KindDate:
		rough = .003 // five years or so
	default:
		rough = .05
	}
	if a.unit != b.unit {
		switch {
		case a.size > 0 && b.size > 0:
			x, y, rough = x*a.size, y*b.size, max(rough, .04)
		case x == y && a.unit.group != 0 && b.unit.group != 0:
			return false, KindUnit
		default:
			return false, ""
		}
	}
	if x == y || math.Abs(x-y) <= rough*max(math.Abs(x), math.Abs(y)) {
		return true, ""
	}
	if a.places != b.places && a.unit == b.unit {
		scale := math.Pow10(int(min(a.places, b.places)))
		if math.Round(x*scale) == math.Round(y*scale) && (a.places > 0 && b.places > 0 || math.Abs(x) >= 10) {
			return true, ""
		}
	}
	if a.unit != b.unit && a.num == b.num {
		return false, KindUnit
	}
	return false, a.kind
}

// monthAt is the number of the month that token j names, or 0.
func (t *Text) monthAt(x *lexicon, j int) int {
	tok := &t.tokens[j]
	if tok.lex == nil || tok.flags&tNumber != 0 {
		return 0
	}
	for _, v := range tok.lex.vals {
		g := &x.groups[v.group]
		if g.kind != KindDate || g.poles != 12 {
			continue
		}
		if (tok.word == "may" || tok.word == "march" || tok.word == "mar") && !t.month(j) {
			return 0
		}
		return int(v.val) + 1
	}
	return 0
}

// date keeps a month and the day beside it.
func (f *Facts) date(fig figure, j, month int) int {
	t := f.text
	s := &f.segments[fig.segment]
	fig.kind = KindDate
	fig.num, fig.keys[0] = float64(month), hash("month", 'k')
	x := loaded()
	f.add(x, fig)
	day := func(k int) float64 {
		if k < int(s.from) || k >= int(s.to) || t.tokens[k].flags&tNumber == 0 {
			return 0
		}
		n, places, ok := number(t.lang, t.tokens[k].word)
		if !ok || places > 0 || n < 1 || n > 31 {
			return 0
		}
		return n
	}
	d, end := day(j+1), j+1
	if d == 0 {
		end = j
		before := j - 1
		if before >= 0 && (t.tokens[before].word == "of" || t.tokens[before].word == "de") {
			before--
		}
		if d = day(before); d != 0 && len(f.figures) > 1 {
			// The day was kept as a bare number.
			if last := &f.figures[len(f.figures)-2]; int(last.tok) == before && last.unit.group == 0 {
				last.soft = true
				last.keys = [2]uint32{}
			}
		}
	}
	if d != 0 {
		fig.num, fig.keys[0] = math.Min(d, float64(month))*100+math.Max(d, float64(month)), hash("date", 'k')
		f.add(x, fig)
	}
	return end
}

// numericDate keeps "2024-03-05", "5.3.2024", "3/5/24".
func (f *Facts) numericDate(fig figure, j int) bool {
	w := f.text.tokens[j].word
	parts := strings.FieldsFunc(w, func(r rune) bool { return r == '-' || r == '/' || r == '.' })
	if len(parts) != 3 || strings.ContainsAny(w, "+:,") {
		return false
	}
	var n [3]int
	for i, p := range parts {
		v, err := strconv.Atoi(p)
		if err != nil || v < 0 {
			return false
		}
		n[i] = v
	}
	if n[0] > 31 {
		n[0], n[2] = n[2], n[0]
	}
	if n[0] < 1 || n[0] > 31 || n[1] < 1 || n[1] > 31 || n[0] > 12 && n[1] > 12 || len(parts[2]) < 2 && len(parts[0]) < 4 || strings.Contains(w, ".") && n[2] < 1000 {
		return false
	}
	x := loaded()
	fig.kind = KindDate
	fig.num, fig.keys[0] = float64(min(n[0], n[1])*100+max(n[0], n[1])), hash("date", 'k')
	f.add(x, fig)
	if n[2] < 100 {
		n[2] += 2000
	}
	fig.num, fig.keys[0] = float64(n[2]), hash("year", 'k')
	f.add(x, fig)
	return true
}

// clock keeps a time of day: "9 am", "17:00", "15 Uhr".
func (f *Facts) clock(fig figure, j int) bool {
	t := f.text
	w := t.tokens[j].word
	h, m, colon := strings.Cut(w, ":")
	hour, err := strconv.Atoi(h)
	if err != nil || hour < 0 || hour > 24 {
		return false
	}
	minute := 0
	if colon {
		if len(m) != 2 {
			return false
		}
		if minute, err = strconv.Atoi(m); err != nil || minute < 0 || minute > 59 {
			return false
		}
	}
	next := ""
	if j+1 < int(f.segments[fig.segment].to) {
		next = t.tokens[j+1].word
	}
	switch next {
	case "am", "a.m.", "a.m", "morning", "midnight":
		hour %= 12
	case "pm", "p.m.", "p.m", "evening", "noon":
		hour = hour%12 + 12
	case "o'clock", "oclock", "o":
		fig.half = hour <= 12
	case "uhr", "heures", "uur":
		if next == "heures" && !colon {
			return false
		}
	default:
		if !colon {
			return false
		}
		fig.half = hour <= 12
	}
	fig.kind, fig.num, fig.keys[0] = KindDate, float64(hour*60+minute), hash("clock", 'k')
	f.add(loaded(), fig)
	return true
}
