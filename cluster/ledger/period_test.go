package ledger

import (
	"archive/zip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func calendar(t testing.TB, period, zone string) Calendar {
	t.Helper()
	c, err := CalendarOf(period, zone)
	must(t, err)
	return c
}

// TestPeriods are the days on which calendars go wrong.
func TestPeriods(t *testing.T) {
	for name, c := range map[string]struct{ period, zone, at, start, end string }{
		"a day in UTC":                    {"day", "", "2026-07-01T23:59:59.999999999Z", "2026-07-01T00:00:00Z", "2026-07-02T00:00:00Z"},
		"its first moment":                {"day", "UTC", "2026-07-02T00:00:00Z", "2026-07-02T00:00:00Z", "2026-07-03T00:00:00Z"},
		"23 hours":                        {"day", "Europe/Berlin", "2026-03-29T12:00:00+02:00", "2026-03-29T00:00:00+01:00", "2026-03-30T00:00:00+02:00"},
		"25 hours":                        {"day", "Europe/Berlin", "2026-10-25T02:30:00+01:00", "2026-10-25T00:00:00+02:00", "2026-10-26T00:00:00+01:00"},
		"24.5 hours":                      {"day", "Australia/Lord_Howe", "2026-04-05T12:00:00+10:30", "2026-04-05T00:00:00+11:00", "2026-04-06T00:00:00+10:30"},
		"no midnight, São Paulo":          {"day", "America/Sao_Paulo", "2018-11-04T01:00:00-02:00", "2018-11-04T01:00:00-02:00", "2018-11-05T00:00:00-02:00"},
		"the day before":                  {"day", "America/Sao_Paulo", "2018-11-03T23:59:59-03:00", "2018-11-03T00:00:00-03:00", "2018-11-04T01:00:00-02:00"},
		"no midnight, Cairo":              {"day", "Africa/Cairo", "2026-04-24T09:00:00+03:00", "2026-04-24T01:00:00+03:00", "2026-04-25T00:00:00+03:00"},
		"23 o'clock twice":                {"day", "Africa/Cairo", "2026-10-29T23:30:00+02:00", "2026-10-29T00:00:00+03:00", "2026-10-30T00:00:00+02:00"},
		"midnight twice":                  {"day", "America/Havana", "2026-11-01T00:30:00-05:00", "2026-11-01T00:00:00-04:00", "2026-11-02T00:00:00-05:00"},
		"back over a minute past it":      {"day", "America/St_Johns", "2010-11-06T23:30:00-03:30", "2010-11-07T00:00:00-02:30", "2010-11-08T00:00:00-03:30"},
		"the minute that was":             {"day", "America/St_Johns", "2010-11-07T00:00:30-02:30", "2010-11-07T00:00:00-02:30", "2010-11-08T00:00:00-03:30"},
		"before a day that never was":     {"day", "Pacific/Apia", "2011-12-29T12:00:00-10:00", "2011-12-29T00:00:00-10:00", "2011-12-31T00:00:00+14:00"},
		"after it":                        {"day", "Pacific/Apia", "2011-12-31T00:00:00+14:00", "2011-12-31T00:00:00+14:00", "2012-01-01T00:00:00+14:00"},
		"a day that was twice":            {"day", "Pacific/Kwajalein", "1969-09-30T12:00:00-12:00", "1969-09-30T00:00:00+11:00", "1969-10-01T00:00:00-12:00"},
		"a zone that changed":             {"day", "Asia/Pyongyang", "2015-08-15T12:00:00+08:30", "2015-08-15T00:00:00+08:30", "2015-08-16T00:00:00+08:30"},
		"a month with such a day":         {"month", "Pacific/Apia", "2011-12-30T12:00:00Z", "2011-12-01T00:00:00-10:00", "2012-01-01T00:00:00+14:00"},
		"February":                        {"month", "", "2026-02-28T23:59:59Z", "2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z"},
		"February 29":                     {"month", "Asia/Tokyo", "2028-02-29T23:59:59+09:00", "2028-02-01T00:00:00+09:00", "2028-03-01T00:00:00+09:00"},
		"the day February 29":             {"day", "Asia/Tokyo", "2028-02-29T12:00:00+09:00", "2028-02-29T00:00:00+09:00", "2028-03-01T00:00:00+09:00"},
		"no February 29 in 2100":          {"day", "", "2100-02-28T12:00:00Z", "2100-02-28T00:00:00Z", "2100-03-01T00:00:00Z"},
		"a month from summer into winter": {"month", "Europe/Berlin", "2026-10-31T23:30:00+01:00", "2026-10-01T00:00:00+02:00", "2026-11-01T00:00:00+01:00"},
		"December":                        {"month", "America/New_York", "2026-12-31T23:59:59-05:00", "2026-12-01T00:00:00-05:00", "2027-01-01T00:00:00-05:00"},
		"not yet next year there":         {"month", "Pacific/Honolulu", "2027-01-01T09:59:59Z", "2026-12-01T10:00:00Z", "2027-01-01T10:00:00Z"},
		"a week across a year's end":      {"week", "", "2026-12-31T12:00:00Z", "2026-12-28T00:00:00Z", "2027-01-04T00:00:00Z"},
		"its Sunday":                      {"week", "", "2027-01-03T23:59:59Z", "2026-12-28T00:00:00Z", "2027-01-04T00:00:00Z"},
		"a week of 167 hours":             {"week", "Europe/Berlin", "2026-03-29T23:59:59+02:00", "2026-03-23T00:00:00+01:00", "2026-03-30T00:00:00+02:00"},
		"a week of 169 hours":             {"week", "America/New_York", "2026-11-01T01:30:00-05:00", "2026-10-26T00:00:00-04:00", "2026-11-02T00:00:00-05:00"},
		"December 31 of a leap year":      {"day", "America/Havana", "2012-12-31T00:00:00-05:00", "2012-12-31T00:00:00-05:00", "2013-01-01T00:00:00-05:00"},
		"far ahead, by the rule":          {"day", "Europe/Berlin", "2199-03-31T12:00:00+02:00", "2199-03-31T00:00:00+01:00", "2199-04-01T00:00:00+02:00"},
	} {
		t.Run(name, func(t *testing.T) {
			parse := func(s string) time.Time {
				at, err := time.Parse(time.RFC3339Nano, s)
				must(t, err)
				return at
			}
			start, end := calendar(t, c.period, c.zone).At(parse(c.at))
			if start != parse(c.start).UnixNano() || end != parse(c.end).UnixNano() {
				zone, _ := LoadZone(c.zone)
				t.Errorf("%v to %v, want %s to %s", time.Unix(0, start).In(zone), time.Unix(0, end).In(zone), c.start, c.end)
			}
		})
	}
}

func TestNoPeriods(t *testing.T) {
	for _, c := range []Calendar{{}, calendar(t, "rolling", ""), calendar(t, "none", "")} {
		if start, end := c.At(time.Unix(1e9, 0)); start != 0 || end != 0 {
			t.Errorf("a period from %d to %d", start, end)
		}
	}
	for _, c := range [][2]string{{"year", ""}, {"day", "Local"}, {"day", "Europe/Bonn"}, {"day", "europe/berlin"}, {"day", "../etc/passwd"}, {"day", "Europe/"}} {
		if _, err := CalendarOf(c[0], c[1]); err == nil {
			t.Errorf("%q is a calendar", c)
		}
	}
}

// allZones are those of the database in this program.
func allZones(t testing.TB) (names []string) {
	r, err := zip.NewReader(strings.NewReader(zoneinfo), int64(len(zoneinfo)))
	must(t, err)
	for _, f := range r.File {
		names = append(names, f.Name)
	}
	if len(names) < 400 {
		t.Fatalf("only %d time zones", len(names))
	}
	return names
}

// TestPeriodsTile walks a period at a time through all zones: none has a gap before the next or overlaps it,
// all moments of one are of it, and each begins with the first moment of its date.
func TestPeriodsTile(t *testing.T) {
	names := allZones(t)
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom(names).Draw(t, "zone")
		period := rapid.SampledFrom([]string{"day", "week", "month"}).Draw(t, "period")
		at := rapid.Int64Range(-3_000_000_000, 6_000_000_000).Draw(t, "second") // 1874 to 2160
		zone, err := LoadZone(name)
		if err != nil {
			t.Fatal(err)
		}
		c, err := CalendarOf(period, name)
		if err != nil {
			t.Fatal(err)
		}
		start, end := c.At(time.Unix(at, 0))
		for range 20 {
			if start >= end {
				t.Fatalf("empty: %d to %d", start, end)
			}
			if hours := (end - start) / int64(time.Hour); hours < 21 || hours > 33*24 { // 24 where a day is missing or twice
				t.Fatalf("%v lasts %d hours", time.Unix(0, start).In(zone), hours)
			}
			inside := rapid.Int64Range(start, end-1).Draw(t, "inside")
			for _, x := range []int64{start, inside, end - 1} {
				fresh := Calendar{period, zone, new(atomic.Pointer[span])} // remembers nothing
				if s, e := fresh.At(time.Unix(0, x)); s != start || e != end {
					t.Fatalf("%v is in %d to %d, and %v, its start, in %d to %d", time.Unix(0, x).In(zone), s, e, time.Unix(0, start).In(zone), start, end)
				}
			}
			begins(t, zone, start)
			next, after := c.At(time.Unix(0, end))
			if next != end {
				t.Fatalf("the next of %d to %d begins at %d", start, end, next)
			}
			start, end = next, after
		}
	})
}

// begins checks that a period begins with a date that the clocks did not show before, at midnight unless they were
// put over it.
func begins(t *rapid.T, zone *time.Location, start int64) {
	at, before := time.Unix(0, start).In(zone), time.Unix(0, start-1).In(zone)
	if at.YearDay() == before.YearDay() {
		t.Fatalf("%v and %v are of one day", before, at)
	}
	_, offset := at.Zone()
	_, was := before.Zone()
	if h, m, s := at.Clock(); h+m+s > 0 && offset <= was {
		t.Fatalf("%v begins a day", at)
	}
}

// TestPeriodsHour by hour through years of zones whose clocks change at midnight or over the date line.
func TestPeriodsHour(t *testing.T) {
	for _, name := range []string{"America/Sao_Paulo", "America/Havana", "America/St_Johns", "Africa/Cairo", "Asia/Beirut", "Pacific/Apia", "Pacific/Kwajalein", "America/Asuncion", "Asia/Tehran", "Atlantic/Azores", "Africa/Casablanca", "Antarctica/Troll"} {
		zone, err := LoadZone(name)
		must(t, err)
		c := calendar(t, "day", name)
		highest := 0
		first := time.Date(1987, 1, 2, 0, 0, 0, 0, time.UTC)
		var start, end int64
		for at := first; at.Year() < 2017; at = at.Add(30 * time.Minute) {
			y, m, d := at.In(zone).Date()
			date := y*10000 + int(m)*100 + d
			s, e := c.At(at)
			switch {
			case date > highest && highest != 0: // a new date begins a new period
				if s != end || s > at.UnixNano() || at.UnixNano()-s >= int64(30*time.Minute) {
					t.Fatalf("%s: at %v a new date, and the period began at %v; the last ended at %v", name, at.In(zone), time.Unix(0, s).In(zone), time.Unix(0, end).In(zone))
				}
			case highest != 0 && (s != start || e != end):
				t.Fatalf("%s: at %v the period changes without a new date", name, at.In(zone))
			}
			highest, start, end = max(highest, date), s, e
		}
	}
}

func BenchmarkCalendar(b *testing.B) {
	c := calendar(b, "month", "Europe/Berlin")
	b.Run("same", func(b *testing.B) {
		for b.Loop() {
			c.At(time.Unix(1_800_000_000, 0))
		}
	})
	b.Run("other", func(b *testing.B) {
		at := int64(0)
		for b.Loop() {
			at += 40 * 86400
			c.At(time.Unix(at%4_000_000_000, 0))
		}
	})
}
