package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/cache/calibrate"
	"headgate/cache/embed"
)

// calibration is what the flags of a calibration say.
type calibration struct {
	embedder, url, model string
	keyEnv               string
	budget, confidence   shareFlag
	out, svg             string
	json                 bool
}

// defaultCalibration is where the report goes.
const defaultCalibration = "calibration.html"

func calibrateCommand() *cobra.Command {
	k := calibration{budget: 0.02, confidence: 0.95}
	c := &cobra.Command{
		Use: "calibrate PAIRS.csv", Short: "Find the similarity from which an answer may be reused, from labelled pairs of questions", Args: exactly(1),
		Long: "Score labelled pairs of questions with an embedder and the guards, and recommend the lowest threshold\n" +
			"for mode: static at which surely no more than the budget of the hits are wrong. Half of the pairs choose\n" +
			"it, the other half tests it. The report shows how much both kinds overlap, how often hits are wrong,\n" +
			"what the labels allow, and the worst pairs; it is one file that needs no network.\n\n" +
			"The first line of the file names its columns, among them a and b, which hold the texts, and same_answer:\n" +
			"1 where one answer is right for both, 0 where it is not. Others are not looked at. - is the standard\n" +
			"input. No node is asked, and nothing is changed.",
		Example: "  headgate cache calibrate pairs.csv\n" +
			"  headgate cache calibrate pairs.csv --budget 0.01 --confidence 0.99 --out faq.html --svg faq.svg\n" +
			"  headgate cache calibrate pairs.csv --url http://127.0.0.1:8000/v1 --model bge-small",
	}
	f := c.Flags()
	f.StringVar(&k.embedder, "embedder", "builtin", "builtin: the one of this program; for another, give --url and --model")
	f.StringVar(&k.url, "url", "", "base of a server's OpenAI-compatible API that has /embeddings, such as http://127.0.0.1:8000/v1")
	f.StringVar(&k.model, "model", "", "name of the model on that server")
	f.StringVar(&k.keyEnv, "api-key-env", "", "environment variable that holds the server's key (default: none is sent)")
	f.Var(&k.budget, "budget", "the share of hits that may be wrong, such as 0.02 or 2%")
	f.Var(&k.confidence, "confidence", "how sure it must be that they are no more, such as 0.95 or 95%")
	f.StringVar(&k.out, "out", defaultCalibration, "file of the report; empty for none (with --json: none unless it is given)")
	f.StringVar(&k.svg, "svg", "", "file for the picture of the overlap alone (default: none)")
	f.BoolVar(&k.json, "json", false, "print JSON")
	c.RunE = func(c *cobra.Command, args []string) error {
		if k.json && !f.Changed("out") {
			k.out = ""
		}
		return k.run(c, args[0])
	}
	return c
}

// run a calibration and write what it found. Files are written at its end only.
func (k *calibration) run(c *cobra.Command, path string) error {
	if err := k.check(path); err != nil {
		return err
	}
	in, name := c.InOrStdin(), "standard input"
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return usageError{err}
		}
		defer func() { _ = file.Close() }()
		in, name = file, filepath.Base(path)
	}
	embedder, end, err := k.open()
	if err != nil {
		return err
	}
	defer end()
	config := calibrate.Config{
		Embedder: embedder, Name: k.model, Source: name, Budget: float64(k.budget), Confidence: float64(k.confidence),
		Progress: sayProgress(c.ErrOrStderr()),
	}
	if err := config.Validate(); err != nil {
		return usageError{err}
	}
	report, err := calibrate.Run(c.Context(), in, config)
	var wrong *calibrate.FileError
	switch {
	case errors.As(err, &wrong):
		return usageError{fmt.Errorf("%s: %w", name, err)}
	case err != nil:
		return fmt.Errorf("calibrate %s: %w", name, err)
	}
	return k.write(c.OutOrStdout(), report)
}

// check flags against each other.
func (k *calibration) check(path string) error {
	switch {
	case k.embedder != "builtin":
		return usageError{fmt.Errorf("--embedder %.40q: there is builtin; for a model on a server give --url and --model instead", k.embedder)}
	case (k.url == "") != (k.model == ""):
		return usageError{errors.New("a model on a server needs both --url and --model, as in --url http://127.0.0.1:8000/v1 --model bge-small")}
	case k.out != "" && k.out == k.svg:
		return usageError{fmt.Errorf("--out and --svg are both %s: name two files", k.out)}
	}
	for flag, file := range map[string]string{"out": k.out, "svg": k.svg} {
		pairs, err := os.Stat(path)
		if err != nil || file == "" { // that there are no pairs is said when they are opened
			continue
		}
		if there, err := os.Stat(file); err == nil && os.SameFile(pairs, there) {
			return usageError{fmt.Errorf("--%s would write over the pairs in %s", flag, path)}
		}
	}
	return nil
}

// progressEvery so many records a line says how far it is.
const progressEvery = 2000

// sayProgress tells of long runs.
func sayProgress(to io.Writer) func(int) {
	next := progressEvery
	return func(records int) {
		if records >= next {
			fmt.Fprintf(to, "%d records scored\n", records)
			next = records + progressEvery
		}
	}
}

// write the report to where it is wanted.
func (k *calibration) write(out io.Writer, report *calibrate.Report) error {
	for _, to := range []struct {
		path  string
		write func(io.Writer) error
	}{{k.out, report.WritePage}, {k.svg, report.WriteOverlap}} {
		if to.path == "" {
			continue
		}
		var b bytes.Buffer
		if err := to.write(&b); err != nil {
			return err
		}
		if err := os.WriteFile(to.path, b.Bytes(), 0o600); err != nil { // it holds what users asked
			return fmt.Errorf("write the report: %w", err)
		}
	}
	if k.json {
		return json.NewEncoder(out).Encode(report)
	}
	if err := report.WriteText(out); err != nil {
		return err
	}
	for _, path := range []string{k.out, k.svg} {
		if path != "" {
			fmt.Fprintf(out, "\nwritten to %s\n", path)
		}
	}
	return nil
}

// shareFlag is a share of a whole, written as a decimal or a percentage.
type shareFlag float64

func (s *shareFlag) String() string { return strconv.FormatFloat(float64(*s), 'f', -1, 64) }

// Type is what the help calls its value.
func (*shareFlag) Type() string { return "share" }

// Set reads it. Its bounds are for who uses it.
func (s *shareFlag) Set(text string) error {
	number, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil || v != v || strings.ContainsAny(number, "xX_") {
		return fmt.Errorf("%.20q is no share: write it as 0.02 or 2%%", text)
	}
	if percent {
		v /= 100
	}
	*s = shareFlag(v)
	return nil
}

// Of an embedder for a calibration.
const (
	calibrationMemo    = 256 << 20        // bytes of vectors that are remembered
	calibrationTimeout = 60 * time.Second // of a request with some texts: nobody waits for an answer
)

// open the embedder. What it gives second ends it.
func (k *calibration) open() (*embed.Memo, func(), error) {
	if k.url == "" {
		model, err := embed.Builtin()
		if err != nil {
			return nil, nil, err
		}
		memo := embed.NewMemo(model, calibrationMemo)
		return memo, memo.Close, nil
	}
	key := ""
	if k.keyEnv != "" {
		if key = os.Getenv(k.keyEnv); key == "" {
			return nil, nil, usageError{fmt.Errorf("--api-key-env: there is no variable %.60s in the environment, or it is empty", k.keyEnv)}
		}
	}
	post, err := embed.HTTPPost(http.DefaultClient, k.url, key)
	if err != nil {
		return nil, nil, usageError{fmt.Errorf("--url: %w", err)}
	}
	endpoint, err := embed.NewEndpoint(embed.EndpointConfig{Model: k.model, Version: k.model, Post: post, Timeout: calibrationTimeout})
	if err != nil {
		return nil, nil, err
	}
	memo := embed.NewMemo(endpoint, calibrationMemo)
	return memo, func() { memo.Close(); endpoint.Close() }, nil
}
