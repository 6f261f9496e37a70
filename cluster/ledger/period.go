package ledger

import (
	"archive/zip"
	_ "embed" // the time zones
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"
)

// zoneinfo is the IANA time zone database (public domain) as Go's own tree carries it in
// lib/time/zoneinfo.zip; make generate renews it. The machine's database is never asked: nodes whose
// databases differ would keep one budget in two accounts where its periods end.
//
//go:embed zoneinfo.zip
var zoneinfo string

// LoadZone reads a time zone by its IANA name, such as Europe/Berlin, from the database in this
// program; "" is UTC. It is the same zone on every machine, and needs no file.
func LoadZone(name string) (*time.Location, error) {
	if name == "" || name == "UTC" {
		return time.UTC, nil
	}
	db, err := zip.NewReader(strings.NewReader(zoneinfo), int64(len(zoneinfo)))
	if err != nil {
		return nil, fmt.Errorf("the time zones in this program: %w", err)
	}
	names := make([]string, 0, len(db.File))
	for _, f := range db.File {
		if names = append(names, f.Name); f.Name != name {
			continue
		}
		r, err := f.Open()
		if err != nil {
			return nil, fmt.Errorf("time zone %s: %w", name, err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return nil, fmt.Errorf("time zone %s: %w", name, err)
		}
		return time.LoadLocationFromTZData(name, data)
	}
	return nil, fmt.Errorf("there is no time zone %q: write a name of the IANA database, as in Europe/Berlin%s", clip(name), hintOf(nearestZone(name, names)))
}

// nearestZone is the zone that may be meant; a city alone means the first zone that is called after it.
func nearestZone(name string, names []string) string {
	city := "/" + strings.ToLower(strings.ReplaceAll(name, " ", "_"))
	for _, zone := range names {
		if strings.HasSuffix(strings.ToLower(zone), city) {
			return zone
		}
	}
	return Nearest(name, names)
}

// Calendar cuts time into the periods of a budget. It is a value that may be copied, and is safe for
// concurrent use; the zero value has no periods.
type Calendar struct {
	period string
	zone   *time.Location
	last   *atomic.Pointer[span] // the period of the last answer: every request asks
}

// span is start ≤ t < end in nanoseconds since 1970.
type span struct{ start, end int64 }

// CalendarOf is the calendar of a budget's period (day, week or month; rolling and none have no
// periods) in a time zone by its IANA name.
func CalendarOf(period, zone string) (Calendar, error) {
	loc, err := LoadZone(zone)
	if err != nil {
		return Calendar{}, err
	}
	switch period {
	case "day", "week", "month":
		return Calendar{period, loc, new(atomic.Pointer[span])}, nil
	case "rolling", "none":
		return Calendar{}, nil
	}
	return Calendar{}, fmt.Errorf("%q is not one of %s", clip(period), strings.Join(periodNames, ", "))
}

// At is the period of a moment, start ≤ t < end in nanoseconds since 1970; 0, 0 where there are no
// periods. It is a function of t alone. A day begins with the first moment that its date is on the
// clocks of the zone, which is not midnight where that is skipped, and lasts until the next one does: where
// clocks go back over midnight, a day that had begun goes on. Weeks begin on Monday (ISO 8601), months
// on the 1st. So periods are shorter or longer where clocks change, tile time and never overlap. t lies
// between the years 1700 and 2250.
func (c Calendar) At(t time.Time) (start, end int64) {
	if c.zone == nil {
		return 0, 0
	}
	at := t.UnixNano()
	if s := c.last.Load(); s != nil && s.start <= at && at < s.end {
		return s.start, s.end
	}
	from, until := c.dates(c.dateOf(t))
	s := &span{c.firstMoment(from).UnixNano(), c.firstMoment(until).UnixNano()}
	c.last.Store(s)
	return s.start, s.end
}

// dates are the first one of the period that a date is in, and of the next period.
func (c Calendar) dates(date time.Time) (from, until time.Time) {
	switch c.period {
	case "week":
		from = date.AddDate(0, 0, -((int(date.Weekday()) + 6) % 7))
		return from, from.AddDate(0, 0, 7)
	case "month":
		from = date.AddDate(0, 0, 1-date.Day())
		return from, from.AddDate(0, 1, 0)
	}
	return date, date.AddDate(0, 0, 1)
}

// dateOf is the latest date that the clocks of the zone have shown by t, as midnight UTC. They may show the
// one before at t itself, after they went back over midnight.
func (c Calendar) dateOf(t time.Time) time.Time {
	y, m, d := t.In(c.zone).Date()
	date := time.Date(y, m, d, 0, 0, 0, 0, time.UTC)
	if next := date.AddDate(0, 0, 1); !c.firstMoment(next).After(t) { // no clocks ever went back by more than a day
		return next
	}
	return date
}

// firstMoment is when the clocks of the zone show a date, given as midnight UTC, or a later one for the
// first time.
func (c Calendar) firstMoment(date time.Time) time.Time {
	const furthest = 24 * time.Hour // above every zone's distance from UTC: before, no clock shows the date
	const maxSpans = 16             // between changes of the clocks, within two days; three have been the most
	t := date.Add(-furthest).In(c.zone)
	for range maxSpans {
		_, offset := t.Zone()
		first := date.Add(-time.Duration(offset) * time.Second)
		if first.Before(t) { // the clocks were put over the date's beginning at t
			return t
		}
		_, until := t.ZoneBounds()
		if !until.IsZero() && !until.After(t) { // Go ends every year by rule after 365 days: here on December 31 of a leap year
			until = t.Add(furthest)
		}
		if until.IsZero() || first.Before(until) {
			return first
		}
		t = until
	}
	return t
}
