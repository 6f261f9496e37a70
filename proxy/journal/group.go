package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// ErrTooManyGroups ends a grouping of more than MaxGroups groups.
var ErrTooManyGroups = errors.New("journal: too many groups: name a shorter time, or group by less")

// MaxGroups bounds a Groups.
const MaxGroups = 1 << 20

// Row is what a group of requests comes to. Sums that pass an int64 stay at its end.
type Row struct {
	Values                   []string // in the order of the Groups' fields; a day is 2026-05-03, an hour 2026-05-03T14:00:00+02:00
	Requests                 int64
	Input, CachedInput       int64
	CacheWrite, CacheWrite1h int64
	Output                   int64
	Images, AudioSeconds     int64
	Cost                     int64 // nano-dollars
	Lost                     int64 // nano-dollars, over accounts: see the outcome Lost
}

func (r *Row) add(o *Row) {
	r.Requests = add(r.Requests, o.Requests)
	r.Input = add(r.Input, o.Input)
	r.CachedInput = add(r.CachedInput, o.CachedInput)
	r.CacheWrite = add(r.CacheWrite, o.CacheWrite)
	r.CacheWrite1h = add(r.CacheWrite1h, o.CacheWrite1h)
	r.Output = add(r.Output, o.Output)
	r.Images = add(r.Images, o.Images)
	r.AudioSeconds = add(r.AudioSeconds, o.AudioSeconds)
	r.Cost = add(r.Cost, o.Cost)
	r.Lost = add(r.Lost, o.Lost)
}

// Groups adds requests up. It is for one goroutine.
type Groups struct {
	by   []string
	loc  *time.Location
	rows map[string]*Row // by their values, each with its length
	most int

	key       []byte
	values    []string
	second    int64 // that day and hour are of
	day, hour string
	hasDay    bool
	hasHour   bool
	dated     bool
}

// Fields are what usage can be grouped by.
func Fields() []string {
	return []string{"tenant", "key", "user", "model", "day", "hour", "outcome"}
}

// NewGroups groups by any of Fields, at most once each; none makes one group. Days and hours
// are those of loc in which requests ended; nil is UTC.
func NewGroups(by []string, loc *time.Location) (*Groups, error) {
	for i, field := range by {
		if !slices.Contains(Fields(), field) {
			return nil, fmt.Errorf("journal: usage cannot be grouped by %q: name some of %s", field, strings.Join(Fields(), ", "))
		}
		if slices.Contains(by[:i], field) {
			return nil, fmt.Errorf("journal: usage is grouped by %q twice", field)
		}
	}
	if loc == nil {
		loc = time.UTC
	}
	return &Groups{
		by: slices.Clone(by), loc: loc, rows: map[string]*Row{}, most: MaxGroups, values: make([]string, len(by)),
		hasDay: slices.Contains(by, "day"), hasHour: slices.Contains(by, "hour"),
	}, nil
}

// Add adds one request. What was Lost is no request and has no cost: it has a sum of its own.
func (g *Groups) Add(u *Usage) error {
	g.date(u.Time)
	for i, field := range g.by {
		switch field {
		case "tenant":
			g.values[i] = u.Tenant
		case "key":
			g.values[i] = u.Key
		case "user":
			g.values[i] = u.User
		case "model":
			g.values[i] = u.Model
		case "outcome":
			g.values[i] = u.Outcome
		case "day":
			g.values[i] = g.day
		case "hour":
			g.values[i] = g.hour
		}
	}
	one := Row{
		Requests: 1, Input: u.Input, CachedInput: u.CachedInput, CacheWrite: u.CacheWrite, CacheWrite1h: u.CacheWrite1h,
		Output: u.Output, Images: u.Images, AudioSeconds: u.AudioSeconds, Cost: u.Cost,
	}
	if u.Outcome == Lost {
		one.Requests, one.Lost = 0, u.Reserved
	}
	return g.sum(g.values, &one)
}

// date works out the day and the hour; records of one second follow each other.
func (g *Groups) date(t time.Time) {
	if !g.hasDay && !g.hasHour || g.dated && t.Unix() == g.second {
		return
	}
	g.second, g.dated = t.Unix(), true
	local := t.In(g.loc)
	g.day, g.hour = local.Format(time.DateOnly), local.Format("2006-01-02T15:00:00Z07:00")
}

// AddRow adds another's row, which was grouped by the same fields.
func (g *Groups) AddRow(r *Row) error {
	if len(r.Values) != len(g.by) {
		return fmt.Errorf("journal: a row of %d values among groups of %d", len(r.Values), len(g.by))
	}
	return g.sum(r.Values, r)
}

func (g *Groups) sum(values []string, r *Row) error {
	g.key = g.key[:0]
	for _, v := range values {
		g.key = append(binary.AppendUvarint(g.key, uint64(len(v))), v...)
	}
	row := g.rows[string(g.key)]
	if row == nil {
		if len(g.rows) >= g.most {
			return ErrTooManyGroups
		}
		row = &Row{Values: slices.Clone(values)}
		g.rows[string(g.key)] = row
	}
	row.add(r)
	return nil
}

// Rows gives the groups, ordered by their values.
func (g *Groups) Rows() []Row {
	rows := make([]Row, 0, len(g.rows))
	for _, r := range g.rows {
		rows = append(rows, *r)
	}
	slices.SortFunc(rows, func(a, b Row) int { return slices.Compare(a.Values, b.Values) })
	return rows
}
