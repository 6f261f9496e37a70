package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
	"headgate/cmd/node"
	"headgate/proxy/admin"
)

func usageCommand() *cobra.Command {
	return group("usage", "Export what was used and what it cost, or see who uses most", exportCommand(), topCommand())
}

// usageFlags are those that pick usage. The node reads them.
type usageFlags struct{ by, from, until, last, tenant, zone string }

func (q *usageFlags) add(c *cobra.Command, by, otherwise string) {
	c.Flags().StringVar(&q.last, "last", "", "only of so long, such as 24h (default: "+otherwise+", unless --from says otherwise)")
	c.Flags().StringVar(&q.by, "by", by, "sum by these, such as tenant,day: "+strings.Join(admin.UsageBy(), ", "))
	c.Flags().StringVar(&q.from, "from", "", "only from this month, day or moment on, or from so long ago, such as 2026-01, 2026-01-15 or 7d")
	c.Flags().StringVar(&q.until, "until", "", "only before this month, day or moment")
	c.Flags().StringVar(&q.tenant, "tenant", "", "only this tenant's")
	c.Flags().StringVar(&q.zone, "time-zone", "UTC", "whose months, days and hours are meant, such as Europe/Berlin")
}

// read takes --last for --from.
func (q *usageFlags) read() error {
	if q.last == "" {
		return nil
	}
	if d, err := admin.ParseSpan(q.last); err != nil || d <= 0 {
		return usageError{fmt.Errorf("--last: %q is not a length of time: write 15m, 24h or 30d", q.last)}
	}
	if q.from != "" {
		return usageError{errors.New("--last and --from exclude each other")}
	}
	q.from = q.last
	return nil
}

// values are the parameters of the API, with more; what is empty is left out.
func (q *usageFlags) values(more map[string]string) url.Values {
	v := url.Values{}
	for name, value := range map[string]string{"by": q.by, "from": q.from, "until": q.until, "tenant": q.tenant, "time_zone": q.zone} {
		if value != "" {
			v.Set(name, value)
		}
	}
	for name, value := range more {
		if value != "" {
			v.Set(name, value)
		}
	}
	return v
}

func exportCommand() *cobra.Command {
	var q usageFlags
	var key, user, model, format string
	var dirs []string
	c := &cobra.Command{
		Use: "export", Short: "Print the usage log of all nodes: each request, or sums, as CSV or JSON lines", Args: exactly(0),
		Long: "Print every request that was metered, in the order in which they ended, or with --by the sums of each\n" +
			"combination. Costs are exact, in dollars. Any node answers for all; where one does not answer, what the\nothers have is printed, and the exit code is 1. With --dir the folders of nodes that are gone are read\ninstead, without a node.\n\nheadgate docs usage explains the columns.",
		Example: "  headgate usage export --by tenant,day --from 2026-01 --until 2026-02 --time-zone Europe/Berlin\n" +
			"  headgate usage export --tenant acme --last 7d --format json\n" +
			"  headgate usage export --dir /mnt/gw-3/usage",
	}
	a := adminFlags(c)
	q.add(c, "", "all that is kept")
	c.Flags().StringVar(&key, "key", "", "only this key's")
	c.Flags().StringVar(&user, "user", "", "only this user's")
	c.Flags().StringVar(&model, "model", "", "only this model's: the one that answered")
	c.Flags().StringVar(&format, "format", string(admin.UsageCSV), "csv or json: an object a line")
	c.Flags().StringArrayVar(&dirs, "dir", nil, "read this folder instead of asking a node: usage in the data folder of a node; may be given several times")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := q.read(); err != nil {
			return err
		}
		if a.json {
			format = string(admin.UsageJSON)
		}
		v := q.values(map[string]string{"key": key, "user": user, "model": model, "format": format})
		if len(dirs) > 0 {
			return exportDirs(c, dirs, v)
		}
		v.Set("partial", "true")
		resp, err := a.open(c.Context(), http.MethodGet, "/admin/v1/usage?"+v.Encode(), nil)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		out := &lines{w: c.OutOrStdout()}
		if _, err := io.Copy(out, resp.Body); err != nil {
			return fmt.Errorf("the export broke off, what was printed is not all: %w", err)
		}
		if q.tenant != "" && out.none(format) {
			a.warnUnknown(c, q.tenant)
		}
		missing, err := admin.ReadMissing(resp.Trailer) // comes after the body
		if len(missing) > 0 {
			err = errors.Join(err, fmt.Errorf("%w; headgate usage export --dir DATA_DIR/usage reads the part of a node from its disk: the two together are whole", incomplete(missing)))
		}
		return err
	}
	return c
}

// exportDirs reads usage logs on this machine.
func exportDirs(c *cobra.Command, dirs []string, v url.Values) error {
	q, err := admin.ParseUsageQuery(v, ledger.LoadZone, time.Now())
	if err != nil {
		return usageError{err}
	}
	q.Partial = true
	out := &lines{w: c.OutOrStdout()}
	missing, err := node.ExportUsageDirs(c.Context(), dirs, toStderr(), out, q)
	if q.Tenant != "" && err == nil && out.none(string(q.Format)) {
		fmt.Fprintf(c.ErrOrStderr(), "headgate: warning: there is nothing of tenant %q in it\n", q.Tenant)
	}
	return errors.Join(err, incomplete(missing))
}

// lines counts those that go through it.
type lines struct {
	w io.Writer
	n int
}

// Write passes p on.
func (l *lines) Write(p []byte) (int, error) {
	l.n += bytes.Count(p, []byte{'\n'})
	return l.w.Write(p)
}

// none says that an export had nothing but its head.
func (l *lines) none(format string) bool {
	return l.n == 0 || l.n == 1 && format != string(admin.UsageJSON)
}

// warnUnknown says on stderr that a tenant of whom there is nothing is none of the policy's: it is
// written wrongly, or was removed.
func (a *client) warnUnknown(c *cobra.Command, tenant string) {
	raw, err := a.call(c.Context(), http.MethodGet, "/admin/v1/tenants", nil)
	var known []admin.Tenant
	if err != nil || json.Unmarshal(raw, &known) != nil { // the answer that was asked for has come
		return
	}
	names := make([]string, 0, len(known))
	for _, t := range known {
		names = append(names, t.Name)
	}
	if slices.Contains(names, tenant) {
		return
	}
	fmt.Fprintf(c.ErrOrStderr(), "headgate: warning: there is no tenant %q now%s\n", tenant, ledger.Hint(tenant, names))
}

// incomplete says which nodes an answer lacks; nil if none.
func incomplete(missing []admin.Missing) error {
	if len(missing) == 0 {
		return nil
	}
	var out []string
	for _, m := range missing {
		out = append(out, m.Node+" ("+m.Error+")")
	}
	return fmt.Errorf("incomplete: the usage of these nodes is missing: %s", strings.Join(out, ", "))
}

func topCommand() *cobra.Command {
	var q usageFlags
	var most int
	c := &cobra.Command{
		Use: "top", Short: "Show who spends most, or with --by what: tenants, keys, users, models", Args: exactly(0),
		Example: "  headgate usage top\n  headgate usage top --by key,model --tenant acme --last 24h -n 20",
	}
	a := adminFlags(c)
	q.add(c, "tenant", "1h")
	c.Flags().IntVarP(&most, "number", "n", 10, "how many lines")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := q.read(); err != nil {
			return err
		}
		raw, err := a.call(c.Context(), http.MethodGet, "/admin/v1/usage/top?"+q.values(map[string]string{"n": strconv.Itoa(most)}).Encode(), nil)
		if err != nil {
			return err
		}
		var rows admin.UsageRows
		if err := json.Unmarshal(raw, &rows); err != nil {
			return fmt.Errorf("the node's answer can't be read: %w; is it of another version?", err)
		}
		if q.tenant != "" && len(rows.Rows) == 0 {
			a.warnUnknown(c, q.tenant)
		}
		err = printAs(c, a, raw, func(w io.Writer, r admin.UsageRows) { printTop(w, strings.Split(q.by, ","), r) })
		return errors.Join(err, incomplete(rows.Missing))
	}
	return c
}

// printTop prints a line for each row, and the sum of all.
func printTop(w io.Writer, by []string, r admin.UsageRows) {
	for _, name := range by {
		fmt.Fprint(w, strings.ToUpper(name)+"\t")
	}
	fmt.Fprintln(w, "REQUESTS\tINPUT\tOUTPUT\tCOST\tSHARE")
	line := func(u admin.UsageRow) {
		fmt.Fprintf(w, "%d\t%d\t%d\t$%s\t%s\n", u.Requests, u.Input, u.Output, u.Cost, share(u.Cost, r.Total.Cost))
	}
	for _, u := range r.Rows {
		for _, name := range by {
			fmt.Fprint(w, printable(u.By[name])+"\t")
		}
		line(u)
	}
	fmt.Fprint(w, "all"+strings.Repeat("\t", len(by)))
	line(r.Total)
}

// share of a whole, for people.
func share(part, whole admin.USD) string {
	if whole <= 0 {
		return ""
	}
	return percent(float64(part) / float64(whole))
}
