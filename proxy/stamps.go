package proxy

import (
	"bytes"
	"time"
)

// moments are what makes a text that tells them go stale by itself.
type moments struct {
	days [3]date // yesterday, today, tomorrow
	unix int64
}

// date is a day; 0 stands for what was not said.
type date struct {
	year, month, day int
	weekday          time.Weekday
}

// hasMoment tells whether text tells the date of now, give or take a day for time zones, or a
// time of day. Dates are read in digits (year first, day first, month first, YYYYMMDD, seconds or
// milliseconds since 1970) and with the month in English, German, French or Spanish, with or
// without a year; times in hours and minutes or with am, pm, Uhr or o'clock. What may be a time
// is one: John 3:16 is. Ratios are not (16:9, 1:50 scale), nor addresses, ports, versions, offsets
// of time zones and times that belong to another date. Linear in text; no garbage.
func hasMoment(text []byte, now time.Time) bool {
	m := moments{unix: now.Unix()}
	for i := range m.days {
		t := now.UTC().AddDate(0, 0, i-1)
		m.days[i] = date{t.Year(), int(t.Month()), t.Day(), t.Weekday()}
	}
	for i := 0; i < len(text); {
		var hit bool
		end := i + 1
		switch c := text[i]; {
		case isDigit(c):
			end, hit = m.number(text, i)
		case isLetter(c) || c >= 0x80:
			end, hit = m.word(text, i)
		}
		if hit {
			return true
		}
		i = end
	}
	return false
}

// near tells whether d is one of the days, as far as it is said.
func (m *moments) near(d date) bool {
	for _, n := range m.days {
		year := d.year == 0 || d.year == n.year || d.year < 100 && d.year == n.year%100
		if year && d.month == n.month && d.day == n.day {
			return true
		}
	}
	return false
}

// number reads what begins with the digits at i and returns where to go on.
func (m *moments) number(s []byte, i int) (end int, hit bool) {
	end = skipDigits(s, i)
	if !opens(s, i) { // but 8-9 am
		return end, end-i <= 2 && (s[i-1] == '-' || s[i-1] == '/') && spoken(s, end, figure(s[i:end])) > 0
	}
	switch n := end - i; n {
	case 10, 13:
		x := figure(s[i:end])
		if n == 13 {
			x /= 1000
		}
		const slack = 24 * 60 * 60
		return end, x >= m.unix-slack && x <= m.unix+slack && !isLetterAt(s, end)
	case 8:
		return end, m.near(date{year: int(figure(s[i : i+4])), month: int(figure(s[i+4 : i+6])), day: int(figure(s[i+6 : end]))})
	case 4:
		if d, behind := yearFirst(s, i, end); behind > 0 {
			return skipClock(s, behind), m.near(d)
		}
	case 1, 2:
		if behind := clockAt(s, i); behind > 0 {
			bare := behind-i <= len("14:05") && isDigit(s[behind-1])
			return behind, !bare || !isSigned(s, i) && !isRatio(s, i, behind)
		}
		if a, b, behind := yearLast(s, i, end); behind > 0 {
			return skipClock(s, behind), m.near(a) || m.near(b)
		}
		if d, behind := dayFirst(s, i, end); behind > 0 {
			return skipClock(s, behind), m.near(d)
		}
	}
	return end, false
}

// word reads the word at i and, where it is a month or a weekday, what follows.
func (m *moments) word(s []byte, i int) (end int, hit bool) {
	end = max(wordEnd(s, i), i+1)
	at := skipThe(s, end)
	if !isDigitAt(s, at) { // nearly always
		return end, false
	}
	var buf [maxMonth]byte
	word := lowered(&buf, s[i:end])
	d, behind := dayOf(s, at)
	if behind == 0 {
		return end, false
	}
	month := monthOf(string(word))
	if month == 0 {
		return end, m.weekdayed(weekdayOf(string(word)), d, s, behind)
	}
	said := date{month: month, day: d}
	if y, e := yearBehind(s, behind, ','); e > 0 {
		said.year, behind = y, e
	}
	return skipClock(s, behind), m.near(said)
}

// skipThe passes over what stands between a month or a weekday and the number of the day.
func skipThe(s []byte, i int) int {
	if isAt(s, i, ',') || isAt(s, i, '.') {
		i++
	}
	if i = skipBlank(s, i); hasFold(s, i, "the ") {
		i += len("the ")
	}
	return i
}

// weekdayed tells whether a weekday and the number of a day behind it are one of the days: Monday
// the 30th, if no other month follows at i.
func (m *moments) weekdayed(weekday, d int, s []byte, i int) bool {
	for _, n := range m.days {
		if n.day == d && int(n.weekday) == weekday {
			month, _ := monthAt(s, skipBlank(s, i))
			return month == 0 || month == n.month
		}
	}
	return false
}

// opens tells whether the digits at i begin a number of their own, not what follows a point, a
// colon or a letter.
func opens(s []byte, i int) bool {
	if i == 0 {
		return true
	}
	switch c := s[i-1]; c {
	case '_':
		return false
	case ':': // not main.go:14:05 either
		at := i - 2
		for at >= 0 && isLetter(s[at]) && i-at < len("extension") {
			at--
		}
		return at < 0 || s[at] != '.' && s[at] != ':' && !isDigit(s[at])
	case '.', '-', '/', ',', '+', '\'':
		return i < 2 || !isDigit(s[i-2])
	default:
		return !isLetter(c)
	}
}

// clockAt reads a time of day at i and returns where it ends, 0 where there is none.
func clockAt(s []byte, i int) int {
	end := skipDigits(s, i)
	hour := figure(s[i:end])
	if end-i > 2 || hour > 23 {
		return 0
	}
	minutes := func(at int) bool {
		return at+2 <= len(s) && isDigit(s[at]) && s[at] <= '5' && isDigit(s[at+1]) && !isDigitAt(s, at+2)
	}
	if !isAt(s, end, ':') || !minutes(end+1) {
		if isAt(s, end, '.') && minutes(end+1) { // 9.30 am, 14.05 Uhr
			return spoken(s, end+3, hour)
		}
		return spoken(s, end, hour)
	}
	end += 3
	seconds := isAt(s, end, ':') && minutes(end+1)
	switch {
	case seconds:
		if end += 3; (isAt(s, end, '.') || isAt(s, end, ',')) && isDigitAt(s, end+1) {
			end = skipDigits(s, end+1)
		}
	case isAt(s, end, '.') && isDigitAt(s, end+1):
		return 0
	}
	if behind := spoken(s, end, hour); behind > 0 {
		return behind
	}
	if isAt(s, end, ':') && (isDigitAt(s, end+1) || isLetterAt(s, end+1)) || isLetterAt(s, end) && s[end] != 'Z' && s[end] != 'h' {
		return 0
	}
	return end
}

// spoken reads what makes a number an hour: am, p.m., Uhr, o'clock.
func spoken(s []byte, i int, hour int64) int {
	at := skipBlank(s, i)
	for _, word := range [...]string{"am", "pm", "a.m", "p.m"} {
		if hasFold(s, at, word) && hour >= 1 && hour <= 12 && !isLetterAt(s, at+len(word)) && !isDigitAt(s, at+len(word)) {
			return at + len(word)
		}
	}
	for _, word := range [...]string{"uhr", "o'clock", "o’clock"} {
		if hasFold(s, at, word) && !isLetterAt(s, at+len(word)) {
			return at + len(word)
		}
	}
	return 0
}

// isSigned tells whether what begins at i is an offset of a time zone, such as +05:30.
func isSigned(s []byte, i int) bool { return i > 0 && (s[i-1] == '+' || s[i-1] == '-') }

// isRatio tells whether the words around say that two numbers with a colon are no time.
func isRatio(s []byte, start, end int) bool {
	for _, word := range [...]string{"ratio", "aspect", "scale", "dilution", "odds", "gradient", "mixture", "mix", "display", "monitor", "screen", "resolution", "format"} {
		at := end
		if isAt(s, at, '-') {
			at++
		}
		if at = skipBlank(s, at); hasFold(s, at, word) && !isLetterAt(s, at+len(word)) {
			return true
		}
		for _, between := range [...]string{" ", " of ", " is ", ": "} {
			if at := start - len(word) - len(between); at >= 0 && hasFold(s, at, word) && string(s[at+len(word):start]) == between {
				return true
			}
		}
	}
	return false
}

// yearFirst reads 2026-11-30, 2026/11/30, 2026.11.30 or 2026年11月30日, of which i to end is the year.
func yearFirst(s []byte, i, end int) (d date, behind int) {
	d.year = int(figure(s[i:end]))
	first, second := separator(s, end)
	if first == 0 {
		return date{}, 0
	}
	if d.month, end = twoDigits(s, skipBlank(s, end+first)); end == 0 {
		return date{}, 0
	}
	next, _ := separator(s, end)
	if next == 0 || string(s[end:end+next]) != second {
		return date{}, 0
	}
	if d.day, end = twoDigits(s, skipBlank(s, end+next)); end == 0 {
		return date{}, 0
	}
	return d, end
}

// separator tells how long the one at i is, 0 for none, and which has to follow it.
func separator(s []byte, i int) (n int, next string) {
	switch {
	case isAt(s, i, '-') || isAt(s, i, '/') || isAt(s, i, '.'):
		return 1, string(s[i : i+1])
	case bytes.HasPrefix(s[min(i, len(s)):], []byte("年")):
		return len("年"), "月"
	case bytes.HasPrefix(s[min(i, len(s)):], []byte("月")):
		return len("月"), "日"
	}
	return 0, ""
}

// yearLast reads 30.11.2026, 30/11/2026, 11/30/26 and the like, and 11月30日, which have no year.
// It gives both days that may be meant.
func yearLast(s []byte, i, end int) (a, b date, behind int) {
	n, next := separator(s, end)
	first := int(figure(s[i:end]))
	if n == 0 {
		return date{}, date{}, 0
	}
	second, behind := twoDigits(s, skipBlank(s, end+n))
	if behind == 0 {
		return date{}, date{}, 0
	}
	if next == "日" {
		d := date{month: first, day: second}
		return d, d, behind
	}
	if n, again := separator(s, behind); n == 0 || again != next {
		return date{}, date{}, 0
	}
	at := skipBlank(s, behind+1)
	behind = skipDigits(s, at)
	if n := behind - at; n != 2 && n != 4 || isLetterAt(s, behind) || isAt(s, behind, '.') && isDigitAt(s, behind+1) {
		return date{}, date{}, 0
	}
	year := int(figure(s[at:behind]))
	a, b = date{year: year, month: second, day: first}, date{year: year, month: first, day: second}
	if next == "." { // nobody writes the month first then
		b = a
	}
	return a, b, behind
}

// dayFirst reads 30 November, 30th of November 2026, 30. November 2026, 30-Nov-2026; i to end is the day.
func dayFirst(s []byte, i, end int) (d date, behind int) {
	number, at := dayOf(s, i)
	if at == 0 {
		return date{}, 0
	}
	link := byte(',')
	if c := s[min(at, len(s)-1)]; at == end && (c == '-' || c == '/') {
		link = c
		at++
	}
	at = skipBlank(s, at)
	for _, word := range [...]string{"of ", "de "} {
		if hasFold(s, at, word) {
			at += len(word)
		}
	}
	month, behind := monthAt(s, at)
	if month == 0 {
		return date{}, 0
	}
	if isAt(s, behind, '.') {
		behind++
	}
	d = date{month: month, day: number}
	if y, e := yearBehind(s, behind, link); e > 0 {
		d.year, behind = y, e
	}
	return d, behind
}

// dayOf reads the number of a day: 30, 30., 30th.
func dayOf(s []byte, i int) (d, behind int) {
	if d, behind = twoDigits(s, i); behind == 0 || d == 0 || d > 31 {
		return 0, 0
	}
	for _, suffix := range [...]string{"st", "nd", "rd", "th", ".", "er"} {
		if hasFold(s, behind, suffix) && !isLetterAt(s, behind+len(suffix)) && !isDigitAt(s, behind+len(suffix)) {
			return d, behind + len(suffix)
		}
	}
	if isLetterAt(s, behind) || isAt(s, behind, ':') || isAt(s, behind, '.') || isAt(s, behind, '%') {
		return 0, 0
	}
	return d, behind
}

// yearBehind reads the year that follows a day and month, behind a blank or link.
func yearBehind(s []byte, i int, link byte) (year, behind int) {
	if isAt(s, i, link) {
		i++
	}
	i = skipBlank(s, i)
	if hasFold(s, i, "de ") {
		i += len("de ")
	}
	end := skipDigits(s, i)
	if n := end - i; n != 4 && (n != 2 || link == ',') || isLetterAt(s, end) {
		return 0, 0
	}
	return int(figure(s[i:end])), end
}

// skipClock passes over a time that belongs to the date that ends at i: T14:05:09Z.
func skipClock(s []byte, i int) int {
	at := i
	switch {
	case hasFold(s, i, ", "):
		at += len(", ")
	case hasFold(s, i, " at "):
		at += len(" at ")
	case hasFold(s, i, "t") || isAt(s, i, ' ') || isAt(s, i, ':'):
		at++
	}
	if isDigitAt(s, at) {
		if end := clockAt(s, at); end > 0 {
			return end
		}
	}
	return i
}

// monthOf is the month of a word in lower case, 0 where it is none.
func monthOf(word string) int {
	switch word {
	case "january", "jan", "januar", "jänner", "janvier", "enero":
		return 1
	case "february", "feb", "februar", "février", "fevrier", "febrero":
		return 2
	case "march", "mar", "märz", "maerz", "mars", "marzo":
		return 3
	case "april", "apr", "avril", "abril":
		return 4
	case "may", "mai", "mayo":
		return 5
	case "june", "jun", "juni", "juin", "junio":
		return 6
	case "july", "jul", "juli", "juillet", "julio":
		return 7
	case "august", "aug", "août", "aout", "agosto":
		return 8
	case "september", "sep", "sept", "septembre", "septiembre":
		return 9
	case "october", "oct", "oktober", "okt", "octobre", "octubre":
		return 10
	case "november", "nov", "novembre", "noviembre":
		return 11
	case "december", "dec", "dezember", "dez", "décembre", "decembre", "diciembre", "dic":
		return 12
	}
	return 0
}

// weekdayOf is the weekday of a word in lower case, -1 where it is none.
func weekdayOf(word string) int {
	switch word {
	case "sunday", "sun", "sonntag", "dimanche", "domingo":
		return 0
	case "monday", "mon", "montag", "lundi", "lunes":
		return 1
	case "tuesday", "tue", "tues", "dienstag", "mardi", "martes":
		return 2
	case "wednesday", "wed", "mittwoch", "mercredi", "miércoles":
		return 3
	case "thursday", "thu", "thur", "thurs", "donnerstag", "jeudi", "jueves":
		return 4
	case "friday", "fri", "freitag", "vendredi", "viernes":
		return 5
	case "saturday", "sat", "samstag", "sonnabend", "samedi", "sábado":
		return 6
	}
	return -1
}

// maxMonth is longer than every month and weekday, in bytes.
const maxMonth = 12

// monthAt reads the word at i; 0 where it is no month.
func monthAt(s []byte, i int) (month, end int) {
	var buf [maxMonth]byte
	end = wordEnd(s, i)
	return monthOf(string(lowered(&buf, s[i:end]))), end
}

// wordEnd is where the word at i ends; i where there is none.
func wordEnd(s []byte, i int) int {
	for i < len(s) {
		switch c := s[i]; {
		case isLetter(c):
			i++
		case c == 0xc3 && i+1 < len(s) && s[i+1] >= 0xa0: // à to ÿ
			i += 2
		default:
			return i
		}
	}
	return i
}

// lowered is word in lower case, nothing where it is longer than the buffer.
func lowered(buf *[maxMonth]byte, word []byte) []byte {
	if len(word) > maxMonth {
		return nil
	}
	for k, c := range word {
		if c >= 'A' && c <= 'Z' {
			c |= 0x20
		}
		buf[k] = c
	}
	return buf[:len(word)]
}

// twoDigits reads a number of one or two digits; behind is 0 where there is none.
func twoDigits(s []byte, i int) (x, behind int) {
	end := skipDigits(s, i)
	if n := end - i; n < 1 || n > 2 {
		return 0, 0
	}
	return int(figure(s[i:end])), end
}

// figure is the number of at most 18 digits.
func figure(digits []byte) (x int64) {
	for _, c := range digits {
		x = 10*x + int64(c-'0')
	}
	return x
}

func skipDigits(s []byte, i int) int {
	for isDigitAt(s, i) {
		i++
	}
	return i
}

// skipBlank passes over a blank, plain, no-break or narrow, where there is one.
func skipBlank(s []byte, i int) int {
	for _, blank := range [...]string{" ", "\u00a0", "\u202f"} {
		if i < len(s) && bytes.HasPrefix(s[i:], []byte(blank)) {
			return i + len(blank)
		}
	}
	return i
}

// hasFold tells whether word, in lower case, stands at i, in whatever case.
func hasFold(s []byte, i int, word string) bool {
	if i < 0 || i+len(word) > len(s) {
		return false
	}
	for k := range len(word) {
		c := s[i+k]
		if c >= 'A' && c <= 'Z' {
			c |= 0x20
		}
		if c != word[k] {
			return false
		}
	}
	return true
}

func isAt(s []byte, i int, c byte) bool { return i < len(s) && s[i] == c }
func isDigitAt(s []byte, i int) bool    { return i < len(s) && isDigit(s[i]) }
func isLetterAt(s []byte, i int) bool   { return i < len(s) && isLetter(s[i]) }
func isDigit(c byte) bool               { return c >= '0' && c <= '9' }
func isLetter(c byte) bool              { return c|0x20 >= 'a' && c|0x20 <= 'z' }
