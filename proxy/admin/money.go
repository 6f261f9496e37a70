package admin

import (
	"fmt"
	"math/big"
	"strings"
	"time"
)

// USD is an amount of money in nano-dollars. As text, in JSON too, it is an exact decimal
// number of dollars such as "12.50"; it may be negative.
type USD int64

const (
	nanoPerUSD  = 1_000_000_000
	usdDecimals = 9
)

// ParseUSD reads dollars with at most nine decimals: 250, 0.05, -12.50.
func ParseUSD(s string) (USD, error) {
	const form = "write dollars with at most nine decimals, as in 250.00"
	digits := strings.TrimPrefix(s, "-")
	whole, frac, dotted := strings.Cut(digits, ".")
	if whole == "" || strings.Trim(whole+frac, "0123456789") != "" || dotted && frac == "" || len(frac) > usdDecimals {
		return 0, fmt.Errorf("%q is not an amount of money: %s", s, form)
	}
	if len(whole) > len("9223372036") {
		return 0, fmt.Errorf("%q is more money than can be counted", s)
	}
	n, ok := new(big.Int).SetString(whole+frac+strings.Repeat("0", usdDecimals-len(frac)), 10)
	if !ok || !n.IsInt64() {
		return 0, fmt.Errorf("%q is more money than can be counted", s)
	}
	if digits != s {
		return -USD(n.Int64()), nil
	}
	return USD(n.Int64()), nil
}

// String gives dollars with at least two decimals and no needless zeros.
func (u USD) String() string {
	sign, n := "", uint64(u)
	if u < 0 {
		sign, n = "-", -n // also of the least
	}
	frac := strings.TrimRight(fmt.Sprintf("%09d", n%nanoPerUSD), "0")
	return fmt.Sprintf("%s%d.%s", sign, n/nanoPerUSD, frac+strings.Repeat("0", max(2-len(frac), 0)))
}

// MarshalText writes what String gives.
func (u USD) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText reads what ParseUSD does.
func (u *USD) UnmarshalText(text []byte) (err error) {
	*u, err = ParseUSD(string(text))
	return err
}

// Budget is one account of a budget: what one subject has spent in one period. Outstanding
// is what nodes hold and have not spent: Left is what is neither spent nor outstanding, and
// negative where a budget that is not strict was passed.
type Budget struct {
	Tenant  string    `json:"tenant,omitempty"` // "": of all tenants
	Budget  string    `json:"budget"`
	Scope   string    `json:"scope"`
	Subject string    `json:"subject,omitempty"` // whose; what it combines is apart by U+001F
	Mode    string    `json:"mode"`              // strict | normal
	Period  string    `json:"period"`            // day | week | month | rolling | none
	Start   time.Time `json:"start,omitzero"`    // of the period
	End     time.Time `json:"end,omitzero"`      // when the budget is whole again

	Amount      USD            `json:"amount_usd"`
	Spent       USD            `json:"spent_usd"`
	Outstanding USD            `json:"outstanding_usd"`
	Left        USD            `json:"left_usd"`
	Percent     float64        `json:"spent_percent"`   // for people; 0 where the amount is
	Passed      int            `json:"alert_percent"`   // the highest alert that spending has passed; 0: none
	Stale       bool           `json:"stale,omitempty"` // its period is over, or the policy has it no more
	Holders     []BudgetHolder `json:"holders"`         // nodes that hold some of it
}

// BudgetHolder is a process of a node and what it holds.
type BudgetHolder struct {
	Node        string `json:"node,omitempty"`
	Gone        bool   `json:"gone,omitempty"` // no member of the view, so that it may be gone for good
	Incarnation string `json:"incarnation"`    // of its process, hexadecimal
	Outstanding USD    `json:"outstanding_usd"`
	Accounts    int    `json:"accounts,omitempty"` // in a list of holders: in how many accounts
}

// BudgetAdjustment corrects what an account has spent.
type BudgetAdjustment struct {
	Tenant  string // "": a budget of all tenants
	Budget  string
	Subject string
	At      string // picks the period, as ParseWhen reads it in the budget's zone; "": that of now
	Amount  USD    // a charge; negative: a credit; never 0
	Reason  string // for the audit log; never ""

	NewSubject bool // also where nothing was charged to the subject in that period
}

// BudgetRelease gives up on a node that does not come back: what it held of all budgets is
// free again.
type BudgetRelease struct {
	Node        string // for the audit log
	Incarnation string // of its process, hexadecimal
	Reason      string // for the audit log; never ""
}

// Adjusted is an account after a correction.
type Adjusted struct {
	Start    time.Time `json:"start,omitzero"` // of its period
	End      time.Time `json:"end,omitzero"`
	Spent    USD       `json:"spent_usd"`
	Left     USD       `json:"left_usd"`
	Warnings []string  `json:"warnings,omitempty"`
}

// Released is what a release gave back.
type Released struct {
	Freed USD `json:"freed_usd"`
}

// UsageFormat is how an export is written.
type UsageFormat string

// The formats.
const (
	UsageCSV  UsageFormat = "csv"  // RFC 4180, with a head line
	UsageJSON UsageFormat = "json" // an object a line
)

// UsageQuery picks requests of the usage log by the time at which they ended; empty fields
// mean all.
type UsageQuery struct {
	From, Until              time.Time // from From on, before Until
	Tenant, Key, User, Model string

	By       []string       // sums of each combination of these; none: each request
	Location *time.Location // whose days and hours; never nil
	Format   UsageFormat
	Partial  bool // go on without the nodes that do not answer
}

// UsageBy are what usage can be summed by.
func UsageBy() []string {
	return []string{"tenant", "key", "user", "model", "outcome", "day", "hour"}
}

// Missing is a node whose part of an answer is not there, and why.
type Missing struct {
	Node  string `json:"node"`
	Error string `json:"error"`
}

// UsageTop asks who used most.
type UsageTop struct {
	By       []string // at least one
	From     time.Time
	Until    time.Time
	Tenant   string
	Location *time.Location
	Most     int // rows
}

// UsageRow is what one combination used.
type UsageRow struct {
	By       map[string]string `json:"by"`
	Requests int64             `json:"requests"`
	Input    int64             `json:"input_tokens"`
	Output   int64             `json:"output_tokens"`
	Cost     USD               `json:"cost_usd"`
}

// UsageRows are the dearest ones, and the sum of all, also of those not shown.
type UsageRows struct {
	Rows    []UsageRow `json:"rows"`
	Total   UsageRow   `json:"total"`
	Missing []Missing  `json:"missing"` // nodes whose usage is not in it
}

// Bounds of money and usage.
const (
	// MaxTop bounds the rows of one answer.
	MaxTop = 1000
	// MaxSubject bounds the bytes of whom a budget is for.
	MaxSubject = 1 << 10
)
