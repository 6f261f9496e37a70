package embed

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"headgate/cache/vec"
)

var _ Embedder = (*Model)(nil)

func theModel(tb testing.TB) *Model {
	tb.Helper()
	m, err := Builtin()
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// TestAsset holds the asset to the hash that minilm/README.md states.
func TestAsset(t *testing.T) {
	sum := sha256.Sum256([]byte(asset))
	readme, err := os.ReadFile("minilm/README.md")
	if err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(sum[:]); !strings.Contains(string(readme), "| "+got+" |") {
		t.Errorf("the asset's SHA-256 is %s: not what minilm/README.md says", got)
	}
}

func TestAssetRefused(t *testing.T) {
	for name, file := range map[string]string{
		"empty":     "",
		"headless":  asset[:100],
		"cut off":   asset[:len(asset)/2],
		"not JSON":  "\x08\x00\x00\x00\x00\x00\x00\x00notjson!",
		"something": "\x02\x00\x00\x00\x00\x00\x00\x00{}",
		"oversized": "\xff\xff\xff\xff\xff\xff\xff\xff{}",
	} {
		if _, _, err := readAsset(file); err == nil {
			t.Errorf("an asset that is %s was taken", name)
		}
	}
}

// goldenVectors are texts and what the float32 model makes of them (numpy, from the weights of
// the same package).
func goldenVectors(t *testing.T) (texts []string, vectors [][]float32) {
	t.Helper()
	raw, err := os.ReadFile("testdata/vectors.txt")
	if err != nil {
		t.Fatal(err)
	}
	texts = strings.Split(strings.TrimSuffix(string(raw), "\n"), "\n")
	f, err := os.Open("testdata/vectors.f32.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	for row := range slices.Chunk(decodeFloats(string(data)), builtinDim) {
		vectors = append(vectors, row)
	}
	if len(texts) != len(vectors) {
		t.Fatalf("%d golden texts, %d vectors", len(texts), len(vectors))
	}
	return texts, vectors
}

// TestEqualsFloat32Model: the price of int8 is a cosine of .999 in the mean. Texts of one or two
// words lose most.
func TestEqualsFloat32Model(t *testing.T) {
	texts, want := goldenVectors(t)
	got, err := theModel(t).Embed(t.Context(), texts)
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for i, text := range texts {
		cosine := vec.Dot(got[i], want[i])
		sum += float64(cosine)
		least := float32(.99)
		if len(strings.Fields(text)) < 3 {
			least = .98
		}
		if cosine < least {
			t.Errorf("%.60q: cosine to the float32 model %.4f, at least %.2f is wanted", text, cosine, least)
		}
		if length := vec.Dot(got[i], got[i]); math.Abs(float64(length)-1) > 1e-5 {
			t.Errorf("%.60q: length² %v", text, length)
		}
	}
	if mean := sum / float64(len(texts)); mean < .998 {
		t.Errorf("mean cosine to the float32 model %.5f, at least .998 is wanted", mean)
	}
}

func TestEmbedIsTheSameInCompany(t *testing.T) {
	m := theModel(t)
	texts := []string{"", "a refund", "how long does it take until a refund is back on my card", strings.Repeat("long ", 80), "a refund"}
	together, err := m.Embed(t.Context(), texts)
	if err != nil {
		t.Fatal(err)
	}
	for i, text := range texts {
		alone, err := m.Embed(t.Context(), []string{text})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(alone[0], together[i]) {
			t.Errorf("%.20q has another vector in company", text)
		}
	}
	if none, err := m.Embed(t.Context(), nil); err != nil || len(none) != 0 {
		t.Errorf("no texts: %v, %v", none, err)
	}
}

func TestEmbedTooLong(t *testing.T) {
	m := theModel(t)
	fits := strings.TrimSpace(strings.Repeat("money ", builtinWindow-2))
	if _, err := m.Embed(t.Context(), []string{fits}); err != nil {
		t.Errorf("a text that fills the window: %v", err)
	}
	for _, text := range []string{fits + " x", strings.Repeat("a b c ", 1_000_000)} {
		_, err := m.Embed(t.Context(), []string{"short", text})
		var long *TooLongError
		if !errors.As(err, &long) || long.Index != 1 || long.Limit != builtinWindow || long.Tokens <= builtinWindow {
			t.Errorf("%d bytes: error %v, a TooLongError of text 1 is wanted", len(text), err)
		}
	}
}

func TestEmbedHonoursContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := theModel(t).Embed(ctx, []string{"a"}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, the context's is wanted", err)
	}
}

func TestEmbedByManyGoroutines(t *testing.T) {
	m := theModel(t)
	texts := []string{"reset my password", "how long does a transfer take until it arrives", "hi"}
	want, err := m.Embed(t.Context(), texts)
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for i := range 2 * len(texts) {
				got, err := m.Embed(t.Context(), texts[i%3:])
				if err != nil || !slices.Equal(got[0], want[i%3]) {
					t.Errorf("%q: another vector beside other goroutines (error %v)", texts[i%3], err)
					return
				}
			}
		})
	}
	wait.Wait()
}

func TestExp(t *testing.T) {
	for x := float32(0); x > -90; x -= 0.0137 {
		want := math.Exp(float64(x))
		if got := float64(exp(x)); math.Abs(got-want) > 1e-6*want+2e-37 {
			t.Errorf("exp(%v) = %v, want %v", x, got, want)
		}
	}
}
