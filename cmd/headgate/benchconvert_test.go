package main_test

import (
	"encoding/csv"
	"strings"
	"testing"
)

// TestBenchConvert makes traces of others ones that are replayed, and says what it made.
func TestBenchConvert(t *testing.T) {
	t.Parallel()
	azure := writeFile(t, "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109")
	mooncake := writeFile(t, "m.jsonl", strings.Repeat(`{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}`+"\n", 4))
	usage := writeFile(t, "usage.csv", "time,started,request_id,tenant,input_tokens,output_tokens,outcome\r\n2026-01-15T08:00:09Z,2026-01-15T08:00:08Z,r,acme,20,2,ok\r\n2026-01-15T08:00:10Z,2026-01-15T08:00:08.5Z,r,beta,10,1,ok\r\n")
	for name, c := range map[string]struct {
		args         []string
		code         int
		lines        int    // on stdout
		first, error string // the first request; words on stderr
	}{
		"azure":             {[]string{"azure", azure, "--tenants-by", "even:1"}, 0, 3, "0,t1,374,44", "azure.csv: 2 requests in 4s"},
		"azure's sample":    {[]string{"azure"}, 0, 4001, "0,t6,374,44", "CC BY 4.0"},
		"mooncake":          {[]string{"mooncake", mooncake, "--tenants-by", "zipf:9:2", "--seed", "4"}, 0, 5, "0,t3,600,5", "each session to one of 9 tenants, the i-th with a weight of 1/i^2, seed 4"},
		"mooncake's sample": {[]string{"mooncake", "--first", "1m"}, 0, 163, "0,t6,6758,500", "Apache-2.0"},
		"usage":             {[]string{"usage", usage}, 0, 3, "0,acme,20,2", "of 2 tenants\ntenants: as the file names them"},
		"usage, split":      {[]string{"usage", usage, "--tenants-by", "even:1"}, 0, 3, "0,t1,20,2", "of 1 tenants"},
		"no usage":          {[]string{"usage"}, 2, 0, "", "takes one argument, not 0: usage FILE"},
		"not that format":   {[]string{"usage", azure}, 2, 0, "", "azure.csv:1: column started: it is missing"},
		"nothing on stdin":  {[]string{"usage", "-"}, 2, 0, "", "stdin:1: it is empty"},
		"no such file":      {[]string{"azure", "none.csv"}, 2, 0, "", "none.csv: no such file"},
		"no such format":    {[]string{"azur"}, 2, 0, "", `did you mean "azure"?`},
		"no such split":     {[]string{"azure", "--tenants-by", "zipf"}, 2, 0, "", `--tenants-by: "zipf" is no split into tenants: write file, even:20`},
		"no tenants":        {[]string{"azure", "--tenants-by", "file"}, 2, 0, "", "--tenants-by: the trace names no tenants"},
		"too little":        {[]string{"azure", "--first", "1ms"}, 2, 0, "", "fewer than two requests"},
		"less than nothing": {[]string{"azure", "--first", "-1s"}, 2, 0, "", "--first -1s: it must be above 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := runCLI(t, cleanEnv(), append([]string{"bench", "convert"}, c.args...)...)
			if r.code != c.code {
				t.Errorf("exit code %d, want %d", r.code, c.code)
			}
			contains(t, r.stderr, c.error)
			lines, err := csv.NewReader(strings.NewReader(r.stdout)).ReadAll()
			if err != nil || len(lines) != c.lines {
				t.Fatalf("%d lines, want %d; %v", len(lines), c.lines, err)
			}
			if c.lines == 0 {
				return
			}
			if got := strings.Join(lines[0], ","); got != "time,tenant,input_tokens,output_tokens" {
				t.Errorf("the first line is %s", got)
			}
			if got := strings.Join(lines[1], ","); got != c.first {
				t.Errorf("the first request is %s, not %s", got, c.first)
			}
		})
	}
}
