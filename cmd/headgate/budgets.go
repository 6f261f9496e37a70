package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

func budgetsCommand() *cobra.Command {
	return group("budgets", "Look at what was spent of budgets, correct it, and release what a dead node holds",
		budgetsShowCommand(), correctionCommand("credit", "Give money back to a budget: what was spent of it becomes less", -1),
		correctionCommand("charge", "Take money from a budget: what was spent of it becomes more", 1), holdersCommand(), releaseCommand())
}

func budgetsShowCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "show [TENANT]", Short: "Show what was spent of a tenant's budgets, or of all, and which nodes hold some of it",
		Long: "One line for each budget and whom it is for, of the period that is running. LEFT is what is neither\n" +
			"spent nor held by a node for requests to come; it is below zero where a budget that is not strict was\npassed. Without a tenant the budgets of all are shown, and those that all share.",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return exactly(1)(c, args)
			}
			return nil
		},
		Example: "  headgate budgets show acme\n  headgate budgets show --json",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		path := "/admin/v1/budgets"
		if len(args) > 0 {
			path += "/" + url.PathEscape(args[0])
		}
		return show(c, a, http.MethodGet, path, nil, func(w io.Writer, list []admin.Budget) { printBudgets(w, list, len(args) == 0) })
	}
	return c
}

// printBudgets with the tenants if there are several.
func printBudgets(w io.Writer, list []admin.Budget, tenants bool) {
	if tenants {
		fmt.Fprint(w, "TENANT\t")
	}
	fmt.Fprintln(w, "BUDGET\tSCOPE\tSUBJECT\tMODE\tSPENT\tOF\tUSED\tOUTSTANDING\tLEFT\tPERIOD\tENDS\tHELD BY")
	for _, b := range list {
		if tenants {
			fmt.Fprintf(w, "%s\t", b.Tenant)
		}
		var held []string
		for _, h := range b.Holders {
			held = append(held, holderName(h)+" $"+h.Outstanding.String())
		}
		period := b.Period
		if b.Stale {
			period += " (over)"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", b.Budget, b.Scope, printable(b.Subject), b.Mode, usd(b.Spent), usd(b.Amount), usedPercent(b),
			usd(b.Outstanding), usd(b.Left), period, moment(b.End), strings.Join(held, ", "))
	}
}

// usd is an amount of dollars as people write it.
func usd(u admin.USD) string {
	if s := u.String(); s[0] == '-' {
		return "-$" + s[1:]
	}
	return "$" + u.String()
}

// usedPercent of a budget, cut off: 100.0% is all of it. Nothing where there is nothing to be a part of.
func usedPercent(b admin.Budget) string {
	if b.Amount <= 0 {
		return ""
	}
	used := math.Trunc(10*b.Percent) / 10
	if b.Spent < b.Amount { // which a float may not tell from it
		used = min(used, 99.9)
	}
	return strconv.FormatFloat(used, 'f', 1, 64) + "%"
}

// holderName is a node, and the process where it is none of the view's.
func holderName(h admin.BudgetHolder) string {
	if h.Gone {
		return strings.TrimSpace(h.Node+" gone ") + " " + h.Incarnation
	}
	return h.Node
}

// correction is one call of credit or charge.
type correction struct {
	global  bool
	fresh   bool // also of a subject that was never charged
	subject []string
	at      string
	reason  string

	node *client
}

func correctionCommand(verb, short string, sign admin.USD) *cobra.Command {
	var q correction
	c := &cobra.Command{
		Use: verb + " {TENANT | --global} BUDGET AMOUNT --reason WHY", Short: short,
		Long: short + ".\nA correction is committed by the cluster and stands in the audit log. Without --at it is one of the\nperiod that is running. The usage log stays as it is: it says what was served.",
		Example: "  headgate budgets " + verb + " acme org-month 12.50 --reason 'outage of 2026-06-01'\n" +
			"  headgate budgets " + verb + " acme key-day 1.00 --subject acme-1 --reason 'charged twice'",
	}
	q.node = adminFlags(c)
	c.Flags().BoolVar(&q.global, "global", false, "a budget that all tenants share; no tenant is named then")
	c.Flags().StringArrayVar(&q.subject, "subject", nil, "whom the budget is for, as budgets show lists it: a key, a user, a model; once for each part of a combination, in that order")
	c.Flags().BoolVar(&q.fresh, "new-subject", false, "also where nothing was charged to the subject in that period, which is refused else: it is mostly a slip")
	c.Flags().StringVar(&q.at, "at", "", "a month, day or moment in the period that is meant, in the budget's time zone (default: now)")
	c.Flags().StringVar(&q.reason, "reason", "", "why, for the audit log")
	c.RunE = func(c *cobra.Command, args []string) error {
		if q.global {
			if err := exactly(2)(c, args); err != nil {
				return err
			}
			args = append([]string{""}, args...)
		} else if err := exactly(3)(c, args); err != nil {
			return err
		}
		return q.send(c, verb, sign, args[0], args[1], args[2])
	}
	return c
}

// send asks for the correction.
func (q *correction) send(c *cobra.Command, verb string, sign admin.USD, tenant, budget, text string) error {
	amount, err := admin.ParseUSD(text)
	switch {
	case err != nil:
		return usageError{err}
	case amount <= 0:
		return usageError{fmt.Errorf("%s is not above zero: budgets credit gives back, budgets charge takes", text)}
	case q.reason == "":
		return usageError{errors.New("--reason: say why; it stands in the audit log")}
	}
	body := map[string]any{"budget": budget, "amount_usd": sign * amount, "subject": strings.Join(q.subject, subjectParts), "reason": q.reason}
	if q.fresh {
		body["new_subject"] = true
	}
	if q.at != "" {
		if _, err := admin.ParseWhen(q.at, time.UTC, time.Now()); err != nil {
			return usageError{fmt.Errorf("--at: %w", err)}
		}
		body["at"] = q.at // the node knows the budget's time zone
	}
	path := "/admin/v1/budgets/adjust"
	if !q.global {
		path = "/admin/v1/budgets/" + url.PathEscape(tenant) + "/adjust"
	}
	return send(c, q.node, http.MethodPost, path, body, func(w io.Writer, a admin.Adjusted) {
		if !a.End.IsZero() && q.at != "" {
			budget += " (" + moment(a.Start) + " to " + moment(a.End) + ")"
		}
		fmt.Fprintf(w, "%s of %s: %s of %s are spent now, %s are left\n", verb, usd(amount), usd(a.Spent), budget, usd(a.Left))
		warn(w, a.Warnings)
	})
}

func holdersCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "holders", Short: "List the nodes that hold money of budgets for requests to come, the gone ones first", Args: exactly(0),
		Example: "  headgate budgets holders",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/holders", nil, func(w io.Writer, list []admin.BudgetHolder) {
			fmt.Fprintln(w, "NODE\tINCARNATION\tOUTSTANDING\tACCOUNTS")
			for _, h := range list {
				name := h.Node
				if h.Gone {
					name = strings.TrimSpace(name + " (gone)")
				}
				fmt.Fprintf(w, "%s\t%s\t$%s\t%d\n", name, h.Incarnation, h.Outstanding, h.Accounts)
			}
		})
	}
	return c
}

func releaseCommand() *cobra.Command {
	var incarnation, reason string
	c := &cobra.Command{
		Use: "release NODE --incarnation HEX --reason WHY", Short: "Give back what a node held that crashed and does not come back", Args: exactly(1),
		Long: "What a node that crashed had taken of budgets counts as spent until it is back: started again on its\n" +
			"data folder it says what it really spent, and gives back the rest by itself. Release it only where that\n" +
			"folder is lost: what the node spent last, and had not said yet, is then missing from the budgets. A\nprocess that is still in the view is refused, and one of another node. headgate budgets holders lists them.",
		Example: "  headgate budgets release gw-3 --incarnation 5f2c7e9a10b4d386 --reason 'its disk is dead'",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&incarnation, "incarnation", "", "number of the process, as headgate budgets holders lists it")
	c.Flags().StringVar(&reason, "reason", "", "why, for the audit log")
	c.RunE = func(c *cobra.Command, args []string) error {
		switch {
		case incarnation == "":
			return usageError{errors.New("--incarnation: name the process; headgate budgets holders lists them")}
		case reason == "":
			return usageError{errors.New("--reason: say why; it stands in the audit log")}
		}
		body := map[string]string{"node": args[0], "incarnation": incarnation, "reason": reason}
		return send(c, a, http.MethodPost, "/admin/v1/budgets/release", body, func(w io.Writer, r admin.Released) {
			if r.Freed == 0 {
				fmt.Fprintf(w, "%s holds nothing of any budget; headgate audit --action budget.release lists what was released\n", args[0])
				return
			}
			fmt.Fprintf(w, "$%s that %s held are free again\n", r.Freed, args[0])
		})
	}
	return c
}
