package calibrate

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

// read all that a file has: "line a|b|label" and "line:column reason", and the error that ended it.
func readAll(file string) (out []string, err error) {
	s, err := newSource(strings.NewReader(file))
	if err != nil {
		return nil, err
	}
	for {
		r, problem, err := s.pair()
		switch {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return out, err
		case problem != nil:
			out = append(out, fmt.Sprintf("%d:%d %s", problem.Line, problem.Column, problem.Reason))
		default:
			out = append(out, fmt.Sprintf("%d %s|%s|%v", r.line, r.a, r.b, r.same))
		}
	}
}

func TestFiles(t *testing.T) {
	const head = "a,b,same_answer\n"
	for name, c := range map[string]struct {
		file string
		want []string
	}{
		"plain":           {head + "x,y,1\nu,v,0\n", []string{"2 x|y|true", "3 u|v|false"}},
		"no end of line":  {head + "x,y,1", []string{"2 x|y|true"}},
		"mark of UTF-8":   {"\ufeff" + head + "x,y,1\n", []string{"2 x|y|true"}},
		"quoted header":   {"\ufeff\"a\",\"b\",\"same_answer\"\nx,y,1\n", []string{"2 x|y|true"}},
		"Windows":         {"a,b,same_answer\r\nx,y,1\r\n\"q\r\nr\",s,0\r\nt,u,1\r\n", []string{"2 x|y|true", "3 q\nr|s|false", "5 t|u|true"}},
		"semicolons":      {"a;b;same_answer\nx, and y;z;1\n", []string{"2 x, and y|z|true"}},
		"tabs":            {"a\tb\tsame_answer\nx\ty\tno\n", []string{"2 x|y|false"}},
		"other columns":   {"kind, Same_Answer ,B,a\nk,yes,y,x\n", []string{"2 x|y|true"}},
		"quotes":          {head + "\"x, \"\"y\"\"\",z,TRUE\n", []string{"2 x, \"y\"|z|true"}},
		"spaces":          {head + " x , y , False \n\n  \nu,v,1\n", []string{"2 x|y|false", "4:0 there is no b: the record has 1 of its columns (a comma within a text needs quotes around it)", "5 u|v|true"}},
		"empty text":      {head + "x,,1\n,y,1\n  ,y,1\n", []string{"2:3 b is empty", "3:1 a is empty", "4:1 a is empty"}},
		"labels":          {head + "x,y,2\nx,y,\nx,y,same\n", []string{`2:5 same_answer is "2": write 1, true or yes, or 0, false or no`, `3:5 same_answer is "": write 1, true or yes, or 0, false or no`, `4:5 same_answer is "same": write 1, true or yes, or 0, false or no`}},
		"a comma too few": {head + "x y 1\n", []string{"2:0 there is no b: the record has 1 of its columns (a comma within a text needs quotes around it)"}},
		"not UTF-8":       {head + "x,caf\xe9,1\n", []string{"2:3 b is not UTF-8: save the file as UTF-8"}},
		"large text":      {head + strings.Repeat("x", MaxText+1) + ",y,1\n", []string{"2:1 a has 65537 bytes, at most 65536 are compared"}},
		"header only":     {head, nil},
	} {
		got, err := readAll(c.file)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %q, %v; want %q", name, got, err, c.want)
		}
	}
}

func TestFilesThatAreNone(t *testing.T) {
	const head = "a,b,same_answer\n"
	for name, c := range map[string]struct{ file, want string }{
		"empty":             {"", "line 1: the file is empty"},
		"a mark alone":      {"\ufeff", "line 1: the file is empty"},
		"lines alone":       {"\n\n", "line 1: the file is empty"},
		"UTF-16":            {"\xff\xfea\x00", "line 1, column 1: the file is UTF-16: save it as UTF-8"},
		"old Mac":           {"a,b,same_answer\rx,y,1\r", "line 1, column 16: lines end in a carriage return alone"},
		"no header":         {"x,y,1\nu,v,0\n", "line 1: there is no header: put a first line with the names of the columns, a,b,same_answer"},
		"other names":       {"question1,question2,is_duplicate\n", `line 1: there is no column a among "question1,question2,is_duplicate": the first line names the columns a and b`},
		"no label":          {"a,b\nx,y\n", `line 1: there is no column same_answer among "a,b"`},
		"a column twice":    {"a,b,same_answer,a\n", "line 1, column 17: there is a second column a: remove one"},
		"one long line":     {strings.Repeat("x", 5000), "line 1: the first line is longer than 4096 bytes"},
		"a bare quote":      {head + "x,y,1\nsay \"x\",y,1\n", "line 3, column 5: a quote stands within a text that has none around it: put quotes around the text"},
		"a quote not twice": {head + "\"x \"y\" z\",y,1\n", `line 2, column 4: a quote within a quoted text must be written twice ("")`},
		"never closed":      {head + "\"x,y,1\nu,v,0\n", "the record begins on line 2"},
		"never, and large":  {head + "x,y,1\n\"x,y,1\n" + strings.Repeat("u,v,0\n", 60_000), "line 3: the record that begins here is larger than 262144 bytes: most likely a quote is opened and never closed"},
	} {
		_, err := readAll(c.file)
		var wrong *FileError
		if !errors.As(err, &wrong) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
}

// A reader's own errors come through.
func TestReaderFails(t *testing.T) {
	broken := errors.New("the disk is gone")
	for _, head := range []string{"", "a,b,same_answer\nx,y,1\n"} {
		_, err := Run(t.Context(), io.MultiReader(strings.NewReader(head), failing{broken}), testConfig())
		if !errors.Is(err, broken) {
			t.Errorf("%v, want %v", err, broken)
		}
	}
}

type failing struct{ error }

func (f failing) Read([]byte) (int, error) { return 0, f.error }

func FuzzFile(f *testing.F) {
	f.Add("a,b,same_answer\nx,y,1\n\"q\"\"\r\nr\",s,no\n")
	f.Add("\ufeffb;a;same_answer\nx;y;1")
	f.Add("a,b,same_answer\n\"x,y")
	f.Add("a\tb\tsame_answer\n,,\n\xff,y,1\n")
	f.Fuzz(func(t *testing.T, file string) {
		s, err := newSource(strings.NewReader(file))
		var wrong *FileError
		for last := 1; err == nil; {
			var r record
			var problem *Problem
			r, problem, err = s.pair()
			at := r.line
			if problem != nil {
				at = problem.Line
			}
			switch {
			case err != nil:
			case at < last || at > strings.Count(file, "\n")+1:
				t.Fatalf("a record on line %d after one on line %d", at, last)
			case problem == nil && (unfit(r.a) != "" || unfit(r.b) != ""):
				t.Fatalf("a pair that is unfit: %q, %q", r.a, r.b)
			case problem != nil && problem.Reason == "":
				t.Fatal("a problem without a reason")
			}
			last = max(last, at)
		}
		if !errors.Is(err, io.EOF) && !errors.As(err, &wrong) {
			t.Fatalf("an error without a place: %v", err)
		}
		if wrong != nil && (wrong.Line < 1 || wrong.Line > strings.Count(file, "\n")+2 || wrong.Column < 0) {
			t.Fatalf("an error at no place: %v", wrong)
		}
	})
}
