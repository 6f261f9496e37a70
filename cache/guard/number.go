package guard

import (
	"strconv"
	"strings"
)

// numeric reads a chunk with digits as a number with what clings to it: a sign, a currency,
// a unit, a percent sign, an ordinal ending. It reports false for what is no number, which
// then is an identifier. Dates, times of the clock and versions stay one token each, since
// no part of one may differ.
func (s *scanner) numeric(c string) bool {
	head, rest := "", c
	for rest != "" {
		n := currency(rest)
		if n == 0 {
			break
		}
		head, rest = rest[:n], rest[n:]
	}
	sign := ""
	switch {
	case rest != "" && (rest[0] == '-' || rest[0] == '+'):
		sign, rest = rest[:1], rest[1:]
		if sign == "+" {
			sign = ""
		}
	case strings.HasPrefix(rest, "v") && len(rest) > 1 && rest[1] >= '0' && rest[1] <= '9':
		rest = rest[1:]
	case strings.HasPrefix(rest, "#"):
		rest = rest[1:]
	}
	end := 0
	digit := func(i int) bool { return i < len(rest) && rest[i] >= '0' && rest[i] <= '9' }
	for digit(end) || end > 0 && end < len(rest) && strings.IndexByte(".,:/", rest[end]) >= 0 && digit(end+1) {
		end++
	}
	if end == 0 {
		return false
	}
	digits, tail := rest[:end], rest[end:]
	if len(tail) > 1 && tail[0] == '-' && onlyDigits(tail[1:]) {
		// 2024-06-12, 555-1234: as one.
		digits, tail = rest, ""
	}
	value := sign + canonical(digits)
	if value == "" {
		return false
	}
	unit, mult, ok := suffix(tail)
	if !ok {
		return false
	}
	if head != "" {
		s.push(head, 0)
	}
	flags := uint16(tNumber)
	if unit == "th" {
		unit, flags = "", tNumber|tOrdinal
	}
	s.push(value+mult, flags)
	if unit != "" {
		s.push(unit, tJoined)
	}
	return true
}

// currency is the length of a currency sign that s begins with, or 0.
func currency(s string) int {
	for _, sign := range [...]string{"$", "€", "£", "¥", "₹", "₩", "~"} {
		if strings.HasPrefix(s, sign) {
			return len(sign)
		}
	}
	return 0
}

func onlyDigits(s string) bool {
	for i := 0; i < len(s); i++ {
		if (s[i] < '0' || s[i] > '9') && s[i] != '-' {
			return false
		}
	}
	return true
}

// canonical strips thousands' commas and leading zeros: "5,000" is "5000", "007" is "7".
// What has other signs inside ("1.2.3", "12/06/2024", "10:30") stays as it is.
func canonical(d string) string {
	if strings.IndexByte(d, ',') >= 0 {
		parts := strings.Split(d, ",")
		for _, p := range parts[1:] {
			whole, _, _ := strings.Cut(p, ".")
			if len(whole) != 3 {
				return strings.ReplaceAll(d, ",", ".") // a decimal comma
			}
		}
		d = strings.Join(parts, "")
	}
	if strings.ContainsAny(d, "/:") {
		return d
	}
	for len(d) > 1 && d[0] == '0' && d[1] >= '0' && d[1] <= '9' {
		d = d[1:]
	}
	return d
}

// suffix reads what follows digits: a unit, a multiplier given as zeros, or an ordinal ending.
func suffix(tail string) (unit, zeros string, ok bool) {
	tail = strings.TrimPrefix(tail, "-")
	switch l := lower(tail); l {
	case "":
		return "", "", true
	case "st", "nd", "rd", "th":
		return "th", "", true
	case "k":
		return "", "000", true
	case "m", "bn", "x", "d", "h", "s", "w", "y", "g", "l", "c", "f":
		return map[string]string{
			"m": "m", "bn": "billion", "x": "times", "d": "days", "h": "hours", "s": "seconds", "w": "weeks", "y": "years",
			"g": "gram", "l": "litre", "c": "celsius", "f": "fahrenheit",
		}[l], "", true
	case "%", "€", "$", "£", "°", "°c", "°f", "¥":
		return l, "", true
	case "+":
		return "", "+", true
	case "mm", "cm", "km", "kms", "in", "ft", "mi", "mg", "kg", "lb", "lbs", "oz", "ml", "ms", "sec", "min", "mins", "hr", "hrs",
		"kb", "mb", "gb", "tb", "mph", "kmh", "km/h", "hz", "khz", "mhz", "ghz", "kw", "kwh", "am", "pm", "eur", "usd", "gbp",
		"gib", "mib", "kib", "mbps", "gbps", "dpi", "psi", "days", "day", "hours", "hour", "weeks", "week", "months", "month",
		"years", "year", "minutes", "minute", "seconds", "miles", "mcg", "sqm", "yrs", "yr":
		return l, "", true
	}
	return "", "", false
}

// spell adds a number word to the one before it: "twenty five", "two hundred", "5 million".
// It reports false where the two are two numbers.
func spell(before, word string) (string, bool) {
	a, errA := strconv.ParseInt(before, 10, 64)
	b, errB := strconv.ParseInt(word, 10, 64)
	switch {
	case errA != nil || errB != nil || a <= 0 || a > 1e12:
		return "", false
	case b == 100 && a < 100, b == 12 && a < 12 && word == "12", b >= 1000 && a < 1000:
		return strconv.FormatInt(a*b, 10), true
	case a >= 20 && a < 100 && a%10 == 0 && b < 10, a >= 100 && a%100 == 0 && b < 100:
		return strconv.FormatInt(a+b, 10), true
	}
	return "", false
}

// duration turns a number of fixed units of time into one that compares: seconds, or months.
func duration(num, unit string) (string, bool) {
	n, err := strconv.ParseFloat(num, 64)
	if err != nil || n < 0 || n > 1e9 {
		return "", false
	}
	factor, sign := 0.0, "s"
	switch unit {
	case "second", "seconds", "sec", "secs":
		factor = 1
	case "minute", "minutes", "min", "mins":
		factor = 60
	case "hour", "hours", "hr", "hrs":
		factor = 3600
	case "day", "days":
		factor = 86400
	case "week", "weeks":
		factor = 7 * 86400
	case "fortnight":
		factor = 14 * 86400
	case "month", "months":
		factor, sign = 1, "mo"
	case "year", "years", "yr", "yrs":
		factor, sign = 12, "mo"
	default:
		return "", false
	}
	return strconv.FormatFloat(n*factor, 'f', -1, 64) + sign, true
}
