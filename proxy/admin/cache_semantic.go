package admin

import (
	"errors"
	"net/http"
	"time"
)

// CacheWrong says that an answer which was served to a question in other words was wrong.
type CacheWrong struct {
	Entry string // as X-Headgate-Cache-Entry and the log name it
}

// CacheWrongDone is what came of it.
type CacheWrongDone struct {
	Evicted   int    `json:"evicted"`             // nodes on which the entry was, and is no more
	Unreached int    `json:"unreached,omitempty"` // nodes that could not be asked
	Tenant    string `json:"tenant,omitempty"`    // whose it was, and of which surface, where that is known
	Surface   string `json:"surface,omitempty"`
}

// CacheSemantic is what the semantic cache of the answering node holds and did for a surface of a tenant, for
// the partitions that are its own. The budget is the whole cluster's.
type CacheSemantic struct {
	Tenant     string `json:"tenant"`
	Surface    string `json:"surface"`
	Embedder   string `json:"embedder"`
	Mode       string `json:"mode,omitempty"` // of the policy in force: shadow, static or learned; "": it has none for the surface, or another embedder
	Partitions int    `json:"partitions"`
	Entries    int    `json:"entries"`
	Bytes      int64  `json:"bytes"`
	Missed     int64  `json:"missed"`   // questions with nothing near enough
	Explored   int64  `json:"explored"` // of which the model was asked, to learn,
	Audited    int64  `json:"audited"`  // likewise, where there would have been a hit,
	Served     int64  `json:"served"`   // and hits
	Same       int64  `json:"same"`     // comparisons of the model's answer with the kept one, by what they found
	Different  int64  `json:"different"`
	Unknown    int64  `json:"unknown"`
	Reported   int64  `json:"reported"` // by people, as wrong
	Probes     int64  `json:"probes"`   // questions that look made to be taken for others

	Budget    CacheBudget `json:"budget"`
	ServedAt  []int64     `json:"served_at"`  // hits by similarity, from 0 to 1 in steps of 0.02
	RefusedAt []int64     `json:"refused_at"` // likewise, what the guards refused
}

// CacheBudget is how often a semantic cache is wrong, as far as that is known.
type CacheBudget struct {
	Requests   int64      `json:"requests"`
	WouldHits  int64      `json:"would_hits"` // served, or would have been
	Audited    int64      `json:"audited"`    // of those
	Wrong      int64      `json:"wrong"`      // of the audited
	PerRequest CacheRate  `json:"error_per_request"`
	PerHit     CacheRate  `json:"error_per_hit"`
	Confidence float64    `json:"confidence"` // of the bounds
	Unlabelled int64      `json:"unlabelled"` // audits that found out nothing, beside Audited
	Tripped    bool       `json:"tripped"`    // the budget is exceeded: nothing is served
	Blind      bool       `json:"blind"`      // too few of the newest audits found out anything: nothing is served
	By         CacheFound `json:"tripped_by"` // what exceeded the budget, reports among it; empty where it is not
	Since      CacheFound `json:"since"`      // what was found after that
	Trips      int64      `json:"trips"`
}

// CacheFound is what audits found.
type CacheFound struct {
	Audited int64 `json:"audited"`
	Wrong   int64 `json:"wrong"`
}

// CacheRate is a share and its bounds.
type CacheRate struct {
	Estimate float64 `json:"estimate"`
	Lower    float64 `json:"lower"`
	Upper    float64 `json:"upper"`
}

// CacheDecision is what the semantic cache said to one request of the answering node. It has no content.
type CacheDecision struct {
	Time       time.Time `json:"time"`
	Request    string    `json:"request"`
	Tenant     string    `json:"tenant"`
	Surface    string    `json:"surface"`
	Action     string    `json:"action"` // miss, explore, audit or serve
	Shadow     bool      `json:"shadow,omitempty"`
	Entry      string    `json:"entry,omitempty"`
	Similarity float64   `json:"similarity"`
	Threshold  float64   `json:"threshold"`
	Tau        float64   `json:"tau,omitempty"`
	Refused    []string  `json:"refused,omitempty"` // by guards of these kinds
	Why        string    `json:"why"`
	Owner      string    `json:"owner,omitempty"` // the node that decided, if another
}

// CacheCompared says whether a request is compared with questions that were asked before, in other words.
type CacheCompared struct {
	Compared  bool    `json:"compared"`
	Why       string  `json:"why,omitempty"`       // not
	Mode      string  `json:"mode,omitempty"`      // shadow, static or learned
	Threshold float64 `json:"threshold,omitempty"` // of static
	Least     float64 `json:"least,omitempty"`     // similarity that the request asks for
	Embedder  string  `json:"embedder,omitempty"`  // by whose vectors
	Partition string  `json:"partition,omitempty"` // hexadecimal: of all but the last user text. Only what has the same is compared
}

// CachePair is what the semantic cache would make of two requests if one was asked after the other was answered.
type CachePair struct {
	Hit           string         `json:"hit"` // yes, no, or perhaps
	Why           string         `json:"why"`
	SamePartition bool           `json:"same_partition"`
	Similarity    *float64       `json:"similarity,omitempty"` // of the two texts; nil: they are of two embedders
	Refused       []CacheRefusal `json:"refused"`              // by guards, whatever the similarity
}

// CacheRefusal is a guard that refuses a pair of texts, and the words that it goes by.
type CacheRefusal struct {
	Guard  string `json:"guard"`
	First  string `json:"first,omitempty"`
	Second string `json:"second,omitempty"`
}

// readWrong takes the entry.
func readWrong(w http.ResponseWriter, r *http.Request) (CacheWrong, error) {
	var ask struct {
		Entry string `json:"entry"`
	}
	if err := decode(w, r, &ask, maxAsk); err != nil {
		return CacheWrong{}, err
	}
	if ask.Entry == "" {
		return CacheWrong{}, errors.New("entry is missing: X-Headgate-Cache-Entry of the answer has it, and so has the log")
	}
	return CacheWrong{ask.Entry}, nil
}
