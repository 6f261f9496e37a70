package node

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// heldCase is one behaviour that users of other gateways, limiters and caches had to report:
// what must happen here, and the test that holds it.
type heldCase struct {
	file   string // of the list of cases
	number int
	gist   string
	test   string
}

// cases are all of them.
var cases = []heldCase{
	{"01-wire-and-limits.md", 1, "a stream is counted like the same call without streaming", "TestWire01StreamCountsLikeNonStream"},
	{"01-wire-and-limits.md", 2, "the usage of every kind of answer is read, and headers fall by it", "TestWire02EveryUsageShapeIsRead"},
	{"01-wire-and-limits.md", 3, "of two caps the larger is reserved", "TestWire03LargerCapIsReserved"},
	{"01-wire-and-limits.md", 4, "a request without a cap passes", "TestWire04NoCapNeeded"},
	{"01-wire-and-limits.md", 5, "a cap beyond the context is a ceiling, not an error", "TestWire05CapIsACeiling"},
	{"01-wire-and-limits.md", 6, "slots come back after any number of upstream errors", "TestWire06SlotsComeBackAfterUpstreamErrors"},
	{"01-wire-and-limits.md", 7, "an answer that no backend gave holds no slot", "TestWire07LocalAnswersGiveTheirSlotBack"},
	{"01-wire-and-limits.md", 8, "the slot is free before the last byte arrives", "TestWire08SlotIsFreeBeforeTheLastByte"},
	{"01-wire-and-limits.md", 9, "an image costs a flat figure; long text takes linear time", "TestWire09ImagesAreFlat"},
	{"01-wire-and-limits.md", 10, "hits do not move the end of a fixed window", "TestWire10FixedWindowKeepsItsEnd"},
	{"01-wire-and-limits.md", 11, "a changed limit binds at once and keeps what was spent", "TestWire11LimitsChangeAtRunTime"},
	{"01-wire-and-limits.md", 12, "of fifty at once against ten, ten pass, whoever asks", "TestWire12NobodyIsTrusted"},
	{"01-wire-and-limits.md", 13, "rules refuse, and an exhausted model gets no traffic", "TestWire13ExhaustedModelIsNotRoutedTo"},
	{"01-wire-and-limits.md", 14, "no route goes uncounted", "TestWire14EveryRouteCounts"},
	{"01-wire-and-limits.md", 15, "a fallback is admitted and charged like a first attempt", "TestWire15FallbackIsCharged"},
	{"01-wire-and-limits.md", 16, "who leaves in mid-stream pays what was generated, and the upstream stops", "TestWire16ClientKilledInMidStream"},
	{"01-wire-and-limits.md", 17, "of usage on every chunk the last counts", "TestWire17LastUsageCounts"},
	{"01-wire-and-limits.md", 18, "usage is asked for on streams only", "TestWire18UsageIsAskedForOnStreamsOnly"},
	{"01-wire-and-limits.md", 19, "unknown stream options reach the upstream", "TestWire19StreamOptionsKeepUnknownKeys"},
	{"01-wire-and-limits.md", 20, "frames and characters may be cut anywhere; a line without end is bounded", "TestWire20FramesMayBeCutAnywhere"},
	{"01-wire-and-limits.md", 21, "usage is seen through gzip, which the client still gets", "TestWire21GzipIsSeenThrough"},
	{"01-wire-and-limits.md", 22, "an error under status 200 is an error and no output", "TestWire22ErrorUnderStatus200"},
	{"01-wire-and-limits.md", 23, "a cut stream says so, costs what came, and is not tried again", "TestWire23CutStream"},
	{"01-wire-and-limits.md", 24, "usage is deducted once", "TestWire24UsageIsDeductedOnce"},
	{"01-wire-and-limits.md", 25, "a cached token has one price", "TestWire25CachedInputIsPricedOnce"},
	{"01-wire-and-limits.md", 26, "unknown fields pass both ways", "TestWire26UnknownFieldsPass"},
	{"01-wire-and-limits.md", 27, "a message with a tool call stops for it", "TestWire27ToolCallsEndWithToolUse"},
	{"01-wire-and-limits.md", 28, "no body size is special but the cap, which is seen early", "TestWire28BodySizes"},
	{"01-wire-and-limits.md", 29, "malformed JSON names its byte, costs no tokens, and is slowed when it repeats", "TestWire29MalformedNamesItsOffset"},
	{"01-wire-and-limits.md", 30, "Retry-After is true; what waiting cannot mend says so", "TestWire30RetryAfterIsTrue"},
	{"01-wire-and-limits.md", 31, "refusals consume nothing", "TestWire31RefusalsDoNotConsume"},
	{"01-wire-and-limits.md", 32, "two periods on one key both hold", "TestWire32TwoPeriodsHold"},
	{"01-wire-and-limits.md", 33, "very fast and very slow rates are exact", "TestWire33FastAndSlowRatesAreExact"},
	{"01-wire-and-limits.md", 34, "a blocked key is blocked on every path", "TestWire34BlockedKeysAreBlockedEverywhere"},
	{"01-wire-and-limits.md", 35, "remaining is never negative; each reset has its own form", "TestWire35HeadersNeverGoNegative"},

	{"02-distributed.md", 1, "who is not the owner decides from a lease, not from reports", "TestOneLimitForAllNodes"},
	{"02-distributed.md", 2, "an owner's state never goes back", "TestHammeredBucketRefills"},
	{"02-distributed.md", 3, "no period's edge lets twice the limit through, and a busy bucket still drains", "TestConformance"},
	{"02-distributed.md", 4, "refunds apply at zero and never lift a level above the burst", "TestTables"},
	{"02-distributed.md", 5, "a node that stops leaves the ring at once", "TestCleanLeave"},
	{"02-distributed.md", 6, "a name that comes back on another address is a new incarnation", "TestRestartAtANewAddress"},
	{"02-distributed.md", 7, "a bucket that is not full is never forgotten", "TestTableIsBounded"},
	{"02-distributed.md", 8, "messages grow with the leases, not with requests or the square of the nodes", "TestMessagesDoNotGrowWithRequests"},
	{"02-distributed.md", 9, "replacing all nodes in turn admits no more", "TestReplacingAllNodesAdmitsNoMore"},
	{"02-distributed.md", 10, "an owner out of reach costs a bounded wait and then the stated mode", "TestOwnerOutOfReachCostsABoundedWait"},
	{"02-distributed.md", 11, "of two limits that refuse neither burns the other", "TestRefusalsBurnNothingElsewhere"},
	{"02-distributed.md", 12, "the number of nodes does not multiply a limit", "TestOneLimitForAllNodes"},
	{"02-distributed.md", 13, "a killed owner is replaced within seconds, by an empty bucket", "TestLeasesConform"},
	{"02-distributed.md", 14, "a join re-admits nothing", "TestJoinReadmitsNothing"},
	{"02-distributed.md", 15, "hits of an old window do not reach a new one", "TestLeasesThroughAPartition"},
	{"02-distributed.md", 16, "everybody learns where an owner went", "TestTroubleAndPeace"},
	{"02-distributed.md", 17, "a blocked key is blocked on every node, for good", "TestKillsAndRevocationsHoldEverywhereSoon"},
	{"02-distributed.md", 18, "a dead name on a new address is not believed", "TestRestartAtANewAddress"},

	{"03-cache.md", 1, "only whole good answers are kept", "TestWhatIsKept"},
	{"03-cache.md", 2, "an answer kept in one form is replayed correctly in the other", "TestStreamsAndWholeAnswersShare"},
	{"03-cache.md", 3, "the key is the whole body, whatever its order", "TestWhatIsTheSame"},
	{"03-cache.md", 4, "no key crosses tenants", "TestWhoseAnswer"},
	{"03-cache.md", 5, "a hit holds no slot", "TestHitsCostRequestsAndSlots"},
	{"03-cache.md", 6, "a hit on a stream carries the cache's headers", "TestStreamsAndWholeAnswersShare"},
	{"03-cache.md", 7, "a surface may allow a temperature", "TestWhatIsKept"},
	{"03-cache.md", 8, "a dropped write does not make everybody miss", "TestDroppedIsBridged"},
	{"03-cache.md", 9, "tenants are partitions, however alike their prompts", "TestAlikeTenants"},
	{"03-cache.md", 10, "namespaces are partitions", "TestAlikeNamespaces"},
	{"03-cache.md", 11, "what filters a search is identity and settings, not content", "TestAlikeSettings"},
	{"03-cache.md", 12, "similarity and distance are told apart and checked", "TestSemanticRefuses"},
	{"03-cache.md", 13, "opposites that embed alike are kept apart", "TestAlikeOpposites"},
	{"03-cache.md", 14, "the conversation before the question counts", "TestAlikeConversations"},
	{"03-cache.md", 15, "another system prompt is another question", "TestAlikeSystemPrompts"},
	{"03-cache.md", 16, "eviction takes an entry and its vector, and no more", "TestFloodEvictsItsOwn"},
	{"03-cache.md", 17, "deletes neither break the graph nor its recall", "TestRandomOps"},
	{"03-cache.md", 18, "a client may only tighten a threshold", "TestAlikeLeast"},
	{"03-cache.md", 19, "embeddings of two models never meet", "TestAlikeEmbedders"},

	{"04-capacity.md", 1, "who leaves the queue leaves no hole in it", "TestExpiredLeavesAtOnce"},
	{"04-capacity.md", 2, "the queue's bound in bytes holds", "TestBytesAreBounded"},
	{"04-capacity.md", 3, "an idle system admits one, however often it refused", "TestLearnerNeverWedges"},
	{"04-capacity.md", 4, "a backend that hangs hangs alone", "TestOneThatNeverAnswers"},
	{"04-capacity.md", 5, "a thousand users at once are served or refused, not dropped", "TestSystemThousandUsers"},
	{"04-capacity.md", 6, "a long wait shows signs of life and can still fail", "TestSignsOfLife"},
	{"04-capacity.md", 7, "a lost upstream is an error, before the first byte and after it", "TestEveryExitSettles"},
	{"04-capacity.md", 8, "a metric that is gone is unknown, not zero", "TestParseMetrics"},
	{"04-capacity.md", 9, "tokens a minute are measured, not guessed from requests", "TestEstimatesLearn"},
	{"04-capacity.md", 10, "a full fleet and a spent quota look different", "TestFullQueueIsNotQuota"},
	{"04-capacity.md", 11, "a backend that comes back is loaded slowly", "TestSlowStartOfAnUnbounded"},
	{"04-capacity.md", 12, "a connection that the upstream had closed costs the client nothing", "TestStaleConnectionStartsOver"},
}

// TestCasesAreHeld fails where a named test does not exist.
func TestCasesAreHeld(t *testing.T) {
	tests := testNames(t, os.DirFS("../.."))
	seen := map[string]bool{}
	for _, c := range cases {
		name := c.file + " " + strconv.Itoa(c.number)
		if seen[name] {
			t.Errorf("%s stands here twice", name)
		}
		seen[name] = true
		if !tests[c.test] {
			t.Errorf("%s (%s): there is no test %s", name, c.gist, c.test)
		}
	}
}

// TestNoCaseIsMissing compares with the lists, where they lie beside the checkout.
func TestNoCaseIsMissing(t *testing.T) {
	folder := os.DirFS("../../../shared/cases")
	files, err := fs.Glob(folder, "*.md")
	if err != nil || len(files) == 0 {
		t.Skip("the lists of cases are not beside the checkout")
	}
	known := map[string]map[int]bool{}
	for _, c := range cases {
		if known[c.file] == nil {
			known[c.file] = map[int]bool{}
		}
		known[c.file][c.number] = true
	}
	numbered := regexp.MustCompile(`(?m)^(\d+)\. `)
	for _, file := range files {
		text, err := fs.ReadFile(folder, file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range numbered.FindAllStringSubmatch(string(text), -1) {
			n, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			if !known[file][n] {
				t.Errorf("%s %d is not in the table", file, n)
			}
			delete(known[file], n)
		}
		for n := range known[file] {
			t.Errorf("%s has no number %d", file, n)
		}
	}
}

// testNames are those of all tests below root.
func testNames(t *testing.T, root fs.FS) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func (\w+)\(`)
	err := fs.WalkDir(root, ".", func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && (e.Name() == "node_modules" || path != "." && strings.HasPrefix(e.Name(), ".")):
			return filepath.SkipDir
		case e.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		text, err := fs.ReadFile(root, path)
		if err != nil {
			return err
		}
		for _, m := range function.FindAllStringSubmatch(string(text), -1) {
			names[m[1]] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
