package cache

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// AlertKind is what is wrong.
type AlertKind uint8

// The kinds of alerts.
const (
	AlertDrop  AlertKind = iota // the hit rate of ten minutes is far below that of the hour before
	AlertNever                  // there are next to no hits
	AlertRise                   // a personal surface has far more hits than in the hour before
	alertKinds
)

// String is its word: drop, never, rise.
func (k AlertKind) String() string {
	return [...]string{"drop", "never", "rise", "?"}[min(k, alertKinds)]
}

// What makes an alert. A window with fewer lookups than the least says nothing.
const (
	leastRecent  = 100
	leastEarlier = 300
	leastNever   = 500
	neverRate    = 0.005
	neverOver    = 0.01
	neverAfter   = int64(10 * time.Minute) // nothing can be a hit at first
	dropFactor   = 0.5                     // of the rate before,
	dropOver     = 0.75
	riseFactor   = 3.0
	riseOver     = 1.5
	riseRate     = 0.2 // and at least
	chanceSigmas = 5.0 // and by more than chance explains
)

// Bounds of how often somebody is told.
const (
	alertPause  = int64(time.Hour)          // between two of a kind on one surface, and of those that tell of many
	alertLapse  = int64(7 * 24 * time.Hour) // then what is not over is told again
	maxAnHour   = 20                        // of a kind; the others are told of as one
	maxSurfaces = 3                         // that are named where many are told of as one
)

// Alert is something that a person should look at.
type Alert struct {
	Kind            AlertKind
	Tenant, Surface string // both "": it is about several
	Text            string // a sentence, without content
	Parts           []string
	Requests        int64   // that were looked up, in the time that the rate is of
	Rate, Before    float64 // of hits; Before is 0 for never
}

// episode is one thing that goes wrong on one surface, from when it is told until it is over.
type episode struct {
	open bool
	ever bool
	at   int64 // when it was told, if ever
}

// alertBudget bounds the alerts of one kind.
type alertBudget struct {
	began  int64 // the hour
	told   int   // in it
	hushed []watchName
	more   int   // hushed and not named
	next   int64 // when those are told of as one
	ever   bool
}

// verdict is what rates say of a kind.
type verdict uint8

const (
	unclear verdict = iota // too few requests, or between the thresholds
	wrong
	right
)

// judge says what the rates of two windows, and how long the pair has been watched, mean for k.
func (k AlertKind) judge(recent, earlier tally, personal bool, watchedFor int64) verdict {
	if k == AlertNever {
		all := recent.plus(earlier)
		switch rate := all.used(); {
		case all.lookups < leastNever || watchedFor < neverAfter:
			return unclear
		case rate < neverRate:
			return wrong
		case rate >= neverOver:
			return right
		}
		return unclear
	}
	if k == AlertRise && !personal {
		return right
	}
	if recent.lookups < leastRecent || earlier.lookups < leastEarlier {
		return unclear
	}
	now, before := recent.used(), earlier.used()
	// the standard error of the difference, were both drawn from the same
	p := recent.plus(earlier).used()
	sigma := math.Sqrt(p * (1 - p) * (1/float64(recent.lookups) + 1/float64(earlier.lookups)))
	switch {
	case k == AlertDrop && now < dropFactor*before && before-now > chanceSigmas*sigma:
		return wrong
	case k == AlertDrop && now >= dropOver*before:
		return right
	case k == AlertRise && now >= riseRate && now > riseFactor*before && now-before > chanceSigmas*sigma:
		return wrong
	case k == AlertRise && (now <= riseOver*before || now < riseRate/2):
		return right
	}
	return unclear
}

// step moves the episode on and says whether it begins now.
func (e *episode) step(v verdict, now int64) (begins bool) {
	if e.open && (v == right || now-e.at >= alertLapse) {
		e.open = false
	}
	if e.open || v != wrong || e.ever && now-e.at < alertPause {
		return false
	}
	*e = episode{open: true, ever: true, at: now}
	return true
}

// begun is an episode that has just begun.
type begun struct {
	kind            AlertKind
	name            watchName
	recent, earlier tally
	samples         []keySample
	unkept          string // why most of the answers are not kept, if they are not
}

// Alerts returns what has gone wrong since it was called last: each once while it lasts, and
// again after a week, not twice in an hour on one surface, and 20 of a kind in an hour; what is
// beyond is told of as one. Call it every half minute or so; it also makes room.
func (w *Watch) Alerts(now int64) []Alert {
	w.telling.Lock()
	defer w.telling.Unlock()
	w.tidy(now)
	var list []begun
	w.each(func(p *watched) bool {
		if now-p.last >= watchSpan {
			return false // no window has anything in it
		}
		recent, earlier := p.windows(now)
		for kind := range alertKinds {
			if p.episodes[kind].step(kind.judge(recent, earlier, p.personal, now-p.first), now) {
				list = append(list, begun{kind, p.name, recent, earlier, slices.Clone(p.samples), p.mostUnkept()})
			}
		}
		return false
	})
	slices.SortFunc(list, func(a, b begun) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(b.recent.lookups, a.recent.lookups),
			strings.Compare(a.name.tenant, b.name.tenant), strings.Compare(a.name.surface, b.name.surface))
	})
	var out []Alert
	for i := range list {
		if w.budgets[list[i].kind].take(list[i].name, now) {
			out = append(out, list[i].alert(now))
		}
	}
	for kind := range alertKinds {
		if text := w.budgets[kind].others(kind, now); text != "" {
			out = append(out, Alert{Kind: kind, Text: text})
		}
	}
	return out
}

// take says whether there is room for another alert; if not, it is remembered that there was one.
func (b *alertBudget) take(name watchName, now int64) bool {
	if !b.ever || now-b.began >= alertPause {
		b.ever, b.began, b.told = true, now, 0
	}
	if b.told < maxAnHour {
		b.told++
		return true
	}
	if len(b.hushed) < maxSurfaces {
		b.hushed = append(b.hushed, name)
	} else {
		b.more++
	}
	return false
}

// others tells of those there was no room for, once an hour.
func (b *alertBudget) others(kind AlertKind, now int64) string {
	if len(b.hushed) == 0 || now < b.next {
		return ""
	}
	var names []string
	for _, n := range b.hushed {
		names = append(names, fmt.Sprintf("%q of tenant %q", n.surface, n.tenant))
	}
	what := [...]string{"the hit rate of %d more surfaces has dropped", "%d more surfaces have next to no hits", "the hit rate of %d more personal surfaces has suddenly risen"}[kind]
	text := fmt.Sprintf(what, len(b.hushed)+b.more) + ", among them " + strings.Join(names, ", ") + "; headgate cache stats lists them"
	b.hushed, b.more, b.next = nil, 0, now+alertPause
	return text
}

// alert words it.
func (b *begun) alert(now int64) Alert {
	a := Alert{Kind: b.kind, Tenant: b.name.tenant, Surface: b.name.surface, Requests: b.recent.lookups, Rate: b.recent.used(), Before: b.earlier.used()}
	where := fmt.Sprintf("surface %q of tenant %q", a.Surface, a.Tenant)
	rates := fmt.Sprintf("%s of %d requests in the last 10 minutes, %s in the hour before", percent(a.Rate), a.Requests, percent(a.Before))
	samples := b.samples
	switch b.kind {
	case AlertDrop:
		a.Text = "the hit rate of " + where + " has dropped: " + rates + "; an invalidation, a new template or new model version explain it"
		samples = slices.DeleteFunc(samples, func(s keySample) bool { return now-s.at > recentBins*binLength })
	case AlertRise:
		a.Text = "the hit rate of the personal " + where + " has suddenly risen: " + rates + "; see whether its requests still name the user they are for"
		return a
	default:
		all := b.recent.plus(b.earlier)
		a.Requests, a.Rate, a.Before = all.lookups, all.used(), 0
		a.Text = fmt.Sprintf("%s has had %d hits in %d requests of the last 70 minutes", where, all.hits+all.partial, all.lookups)
	}
	if b.unkept != "" { // then it is not the key
		a.Text += "; most answers are not kept: " + b.unkept
		return a
	}
	names, same := differing(samples)
	switch a.Parts = names; {
	case same:
		a.Text += "; those that were sampled are the same request: its answers are not kept"
	case len(names) > 0:
		a.Text += "; those that were sampled differ most often in " + strings.Join(names, ", ") + ": if an answer does not depend on that, leave it out (headgate cache explain-key compares two requests)"
	}
	return a
}

// mostUnkept is why most of the answers to misses are not kept; "" where they are.
func (p *watched) mostUnkept() string {
	if why, _ := p.unkept.most(); 2*p.count[watchUnkept] > p.count[watchMiss] {
		return why
	}
	return ""
}

func percent(rate float64) string { return fmt.Sprintf("%.1f %%", 100*rate) }
