package ledger

import (
	"unique"

	"headgate/cluster/ledger/ledgerpb"
)

// message is the account as snapshots carry it.
func (a *account) message() *ledgerpb.BudgetAccount {
	m := &ledgerpb.BudgetAccount{
		Key: a.Key.message(), Terms: a.Terms.message(), Born: a.born, UnixNano: a.nano(), Spent: a.Spent,
		Slots: slotMessages(a.slots), Minutes: slotMessages(a.minutes),
		Crossed: uint32(a.Crossed), Notified: uint32(a.Notified), Spiked: nanoOrZero(a.Spiked), SpikeTold: nanoOrZero(a.SpikeTold),
		CrossedNano: nanoOrZero(a.CrossedAt),
	}
	for i := range a.Holders {
		h := &a.Holders[i]
		m.Holders = append(m.Holders, &ledgerpb.BudgetHolder{
			Holder: h.Holder, Spent: h.Spent, Outstanding: h.Outstanding, Closed: h.Closed, UnixNano: nanoOrZero(h.Time), Result: h.last.message(h.N), Node: h.Node,
		})
	}
	return m
}

func slotMessages(slots []slot) []*ledgerpb.BudgetSlot {
	var out []*ledgerpb.BudgetSlot
	for _, s := range slots {
		out = append(out, &ledgerpb.BudgetSlot{Index: s.index, Amount: s.amount})
	}
	return out
}

// accountOf is the inverse of message, for whatever bytes stand there.
func accountOf(m *ledgerpb.BudgetAccount) (*account, error) {
	a := &account{
		BudgetAccount: BudgetAccount{
			Key: budgetKeyOf(m.GetKey()), Terms: budgetTermsOf(m.GetTerms()), Time: timeOrZero(m.GetUnixNano()), Spent: m.GetSpent(),
			Crossed: int(m.GetCrossed()), Notified: int(m.GetNotified()), Spiked: timeOrZero(m.GetSpiked()), SpikeTold: timeOrZero(m.GetSpikeTold()),
			CrossedAt: timeOrZero(m.GetCrossedNano()),
		},
		born: m.GetBorn(),
	}
	if err := a.Key.check(); err != nil {
		return nil, err
	}
	if err := a.Terms.check(&a.Key); err != nil {
		return nil, err
	}
	if m.GetUnixNano() < 0 || m.GetBorn() < 0 || m.GetBorn() > m.GetUnixNano() || m.GetSpiked() < 0 || m.GetSpikeTold() < 0 || m.GetCrossedNano() < 0 {
		return nil, refuse(codeInvalid, "its times cannot be")
	}
	if !sums(a.Spent) || a.Crossed > maxPercent || a.Notified > a.Crossed || len(m.GetHolders()) > MaxHolders {
		return nil, refuse(codeInvalid, "its sum, alerts or holders cannot be")
	}
	var err error
	if a.slots, err = slotsOf(m.GetSlots(), maxSlots+1); err != nil {
		return nil, err
	}
	if a.minutes, err = slotsOf(m.GetMinutes(), spikeMinutes+1); err != nil {
		return nil, err
	}
	if a.Terms.Window == 0 && a.slots != nil || a.Terms.Window != 0 && total(a.slots) != a.Spent {
		return nil, refuse(codeInvalid, "its slots are not what it spent")
	}
	for i, h := range m.GetHolders() {
		if h.GetHolder() == 0 || i > 0 && h.GetHolder() <= a.Holders[i-1].Holder || h.GetSpent() < 0 || h.GetOutstanding() < 0 || !sums(h.GetSpent(), h.GetOutstanding()) || len(h.GetNode()) > maxID {
			return nil, refuse(codeInvalid, "its holder %d cannot be", i)
		}
		r := h.GetResult()
		a.Holders = append(a.Holders, BudgetHolder{
			Holder: h.GetHolder(), Node: unique.Make(h.GetNode()).Value(), Spent: h.GetSpent(), Outstanding: h.GetOutstanding(), Closed: h.GetClosed(), N: r.GetN(), Time: timeOrZero(h.GetUnixNano()),
			last: drawn{r.GetGranted(), r.GetSpent(), r.GetAmount(), r.GetOthers(), r.GetFree(), r.GetUnixNano(), r.GetLost(), r.GetClosed()},
		})
	}
	return a, nil
}

// sums says of sums of money that they are such.
func sums(amounts ...int64) bool {
	for _, n := range amounts {
		if n < -maxSum || n > maxSum {
			return false
		}
	}
	return true
}

func slotsOf(m []*ledgerpb.BudgetSlot, most int) ([]slot, error) {
	if len(m) > most {
		return nil, refuse(codeInvalid, "it has %d slots, of %d at most", len(m), most)
	}
	var out []slot
	for i, s := range m {
		if s.GetIndex() < 0 || i > 0 && s.GetIndex() <= out[i-1].index || s.GetAmount() == 0 || !sums(s.GetAmount()) {
			return nil, refuse(codeInvalid, "its slot %d cannot be", i)
		}
		out = append(out, slot{s.GetIndex(), s.GetAmount()})
	}
	return out, nil
}

// budget is an account without its holders.
func (c *canon) budget(a *account) [32]byte {
	c.entry("budget")
	c.budgetKey(&a.Key)
	c.str(a.Terms.Name)
	c.bit(a.Terms.Spike.Kill)
	for _, n := range [...]int64{
		a.Terms.Amount, int64(a.Terms.Revision), int64(a.Terms.Window), int64(a.Terms.Slot), int64(a.Terms.Spike.Factor), int64(a.Terms.Spike.Floor),
		a.born, a.nano(), a.Spent, int64(a.Crossed), int64(a.Notified), nanoOrZero(a.Spiked), nanoOrZero(a.SpikeTold), nanoOrZero(a.CrossedAt),
	} {
		c.num(uint64(n))
	}
	c.num(uint64(len(a.Terms.Alerts)))
	for _, percent := range a.Terms.Alerts {
		c.num(uint64(percent))
	}
	for _, slots := range [...][]slot{a.slots, a.minutes} {
		c.num(uint64(len(slots)))
		for _, s := range slots {
			c.num(uint64(s.index))
			c.num(uint64(s.amount))
		}
	}
	return c.sum()
}

func (c *canon) holder(k *BudgetKey, h *BudgetHolder) [32]byte {
	c.entry("holder")
	c.budgetKey(k)
	c.bit(h.Closed)
	c.bit(h.last.closed)
	c.str(h.Node)
	for _, n := range [...]int64{
		int64(h.Holder), int64(h.N), h.Spent, h.Outstanding, nanoOrZero(h.Time),
		h.last.granted, h.last.spent, h.last.amount, h.last.others, h.last.free, h.last.nano, h.last.lost,
	} {
		c.num(uint64(n))
	}
	return c.sum()
}

func (c *canon) budgetKey(k *BudgetKey) {
	c.str(k.Tenant)
	c.str(k.Limit)
	c.str(k.Subject)
	c.num(uint64(k.Start))
	c.num(uint64(k.End))
}
