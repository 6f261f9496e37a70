package journal

import (
	"errors"
	"io"
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
	Lost                     int64 // nano-dollars, over accounts: see Lost
}

// Groups adds requests up. It is for one goroutine.
type Groups struct{}

// NewGroups groups by any of tenant, key, user, model, day, hour and outcome, at most once
// each; none makes one group. Days and hours are those of loc in which requests ended; nil
// is UTC.
func NewGroups(by []string, loc *time.Location) (*Groups, error) { return nil, errSkeleton }

// By gives the fields.
func (g *Groups) By() []string { return nil }

// Add adds one request.
func (g *Groups) Add(u *Usage) error { return errSkeleton }

// AddRow adds another's row, which was grouped by the same fields.
func (g *Groups) AddRow(r *Row) error { return errSkeleton }

// Rows gives the groups, ordered by their values.
func (g *Groups) Rows() []Row { return nil }

// Encoder writes usage as CSV (RFC 4180, a cell that a spreadsheet would take for a formula
// has a ' in front) or as JSON lines. Costs are decimal dollars, exact to the nano-dollar.
// It is for one goroutine; Flush ends it.
type Encoder struct{}

// NewEncoder of "csv" or "json". by is what rows are grouped by, none for requests.
func NewEncoder(w io.Writer, format string, by []string) (*Encoder, error) { return nil, errSkeleton }

// Usage writes one request.
func (e *Encoder) Usage(u *Usage) error { return errSkeleton }

// Row writes one group.
func (e *Encoder) Row(r *Row) error { return errSkeleton }

// Flush writes what is buffered.
func (e *Encoder) Flush() error { return errSkeleton }
