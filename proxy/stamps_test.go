package proxy

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

// stampsNow is a Monday.
func stampsNow() time.Time { return time.Date(2026, 11, 30, 14, 5, 9, 0, time.UTC) }

func TestHasMoment(t *testing.T) {
	for _, text := range []string{
		"2026-11-30", "2026-11-29", "2026-12-01", "2026-12-1", "on 2026/11/30,", "2026.11.30", "(2026-11-30T14:05:09Z)", "20261130", "20261130T140509Z", "backup-2026-11-30.tar.gz", "https://example.com/2026/11/30/x",
		"30.11.2026", "30.11.26", "30. 11. 2026", "30/11/2026", "11/30/2026", "11/30/26", "30-11-2026", "1/12/2026", "12/1/2026", "date:30.11.2026", "It is 30.11.2026.",
		"30 November 2026", "30 November", "30th November 2026", "the 30th of November, 2026", "30. November 2026", "30 nov. 2026", "30-Nov-2026", "30-Nov-26", "30/Nov/2026:14:05:09 +0000", "1er décembre 2026", "30 de noviembre de 2026", "le 30 novembre",
		"November 30", "November 30.", "November 30th", "November 30, 2026", "NOVEMBER 30TH, 2026", "Nov 30 2026", "Nov. 30, 2026", "Sunday, November 29", "December the 1st", "1. Dezember",
		"Monday the 30th", "Monday, 30", "Montag, 30.", "Tuesday, December 1, 2026", "Mon, 30 Nov 2026 14:05:09 GMT",
		"2026年11月30日", "11月30日", strconv.FormatInt(stampsNow().Unix(), 10), strconv.FormatInt(stampsNow().UnixMilli(), 10), strconv.FormatInt(stampsNow().Unix()-80000, 10),
		"14:05", "It is 14:05.", "at 14:05, or", "9:30", "09:30", "14:05:09", "14:05:09.123", "14:05Z", "14:05h", "14:05-15:00", "from 14:05–15:00", "[14:05]", "\"14:05\"", "time: 14:05", "Time:14:05",
		"2:05 pm", "2:05pm", "2:05\u202fPM", "2:05 p.m.", "9 am", "9am", "12 AM", "2 a.m.", "at 2 a.m. sharp", "8-9 am", "8–9 am", "9.30 am", "14 Uhr", "14.05 Uhr", "14:05 Uhr", "9 o'clock", "9 o’clock",
		"12 May 2020. It is 14:05 now.",
		"John 3:16", // unsure
	} {
		for _, around := range []string{"%", "so: % it is", "a\n%\nb", "日本% ok"} {
			if s := strings.ReplaceAll(around, "%", text); !hasMoment([]byte(s), stampsNow()) {
				t.Errorf("nothing in %q", s)
			}
		}
	}
}

func TestHasNoMoment(t *testing.T) {
	for _, text := range []string{
		"", "16:9", "3:1", "a ratio of 16:10", "16:10 aspect ratio", "16:10 display", "a 1:50 scale", "1:10 dilution", "21:9 monitor", "1:1000", "2:1 (1:1)",
		"version 1.2.3", "v1.2.3", "1.2.26", "go1.26.30", "10.11.12.13", "10.11.12.13:8080", "127.0.0.1:22", "localhost:8080", ":8080", "[::1]:8080", "2001:db8::12:30", "12:30:45:67:89:ab", "00:1A:2B:12:30:45",
		"ISBN 978-3-16-148410-0", "978-30-11-2026-1", "+49 30 11 2026", "main.go:14:05", "example.com:14:05", "UTC+05:30", "UTC-05:00", "GMT+02:00", "+02:00",
		"2020-01-01", "2020-01-01T14:05:09Z", "2020-01-01 14:05:09", "12 May 2020", "12 May 2020, 14:05", "12 May 2020 at 14:05", "May 12, 2020 14:05", "Nov 12 14:05:09", "02/Jan/2020:14:05:09", "2025-11-30", "2026-11-28", "2026-12-02", "2026-13-30", "November 30, 1939", "30 November 1939", "30.11.1939", "11/30/1939", "November 2026", "November", "2026", "30", "11/30", "30%",
		"24:00", "23:60", "14:5", "14:055", "114:05", "4:20.15", "14:05abc", "3:05x", "0 am", "13 pm", "1.5 pm", "100 pm", "9 amps", "9 ample", "3 PMs", "I am 9", "2nd", "30th", "the 30th of May",
		"Monday", "Monday the 29th", "Tuesday 30", "Monday 30 October", "may", "may 29", "march on", "decimal 30", "sunny 30", "9 uhren", "x14:05", "_14:05", "1,014:05", "5'14:05",
		"1600000000", "12345678901", "1796047509000000", "20201130", "99999999", "3.14159", "30. Item", "11-30",
	} {
		for _, around := range []string{"%", "so: % it is", "a\n%\nb", "(%)"} {
			if s := strings.ReplaceAll(around, "%", text); hasMoment([]byte(s), stampsNow()) {
				t.Errorf("a moment in %q", s)
			}
		}
	}
}

// TestHasMomentOfEveryDay: today is found whenever it is, in any of the usual forms.
func TestHasMomentOfEveryDay(t *testing.T) {
	for now := time.Date(2026, 1, 1, 0, 30, 0, 0, time.UTC); now.Year() < 2029; now = now.AddDate(0, 0, 1) {
		for _, layout := range []string{time.DateOnly, "02.01.2006", "2.1.2006", "01/02/2006", "1/2/06", "2/1/2006", "January 2, 2006", "Jan 2", "Monday, 2 January", "02-Jan-06", "20060102", time.RFC1123Z} {
			for shift := -1; shift <= 1; shift++ {
				if s := now.AddDate(0, 0, shift).Format(layout); !hasMoment([]byte(s), now) {
					t.Fatalf("on %v: nothing in %q", now, s)
				}
			}
			if s := now.AddDate(0, 0, 45).Format(layout); layout != "1/2/06" && layout != "2/1/2006" && layout != "01/02/2006" && layout != time.RFC1123Z && hasMoment([]byte(s), now) {
				t.Fatalf("on %v: a moment in %q", now, s)
			}
		}
	}
}

func TestHasMomentAllocates(t *testing.T) {
	text := []byte(prose(64 << 10))
	if n := testing.AllocsPerRun(10, func() {
		if hasMoment(text, stampsNow()) {
			t.Error("a moment in prose")
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func prose(size int) string {
	const sentence = "The 2nd of 14 quick brown foxes, aged 3.5 years, may jump over the lazy dog at a ratio of 16:9 – März, überhaupt; see RFC 8259 and 10.0.0.1:8080. "
	return strings.Repeat(sentence, size/len(sentence)+1)
}

// FuzzHasMoment: whatever the text, the search ends, and does not lose what is at its end.
func FuzzHasMoment(f *testing.F) {
	for _, s := range []string{"30. November 2026", "2026年11月30日", "14:05:09.1 pm", "30/Nov/2026:14:05:09", "Monday, the 30th of", "1796047509", "9.30 a.m", "ratio of 16:10-display"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		found := hasMoment(text, stampsNow())
		with := append(append([]byte{}, text...), "\n\nIt is 2026-11-30."...)
		if !hasMoment(with, stampsNow()) {
			t.Errorf("nothing in %q", with)
		}
		if behind := append([]byte("x\n\n"), text...); hasMoment(behind, stampsNow()) != found {
			t.Errorf("%q depends on the paragraph before it", text)
		}
	})
}

func BenchmarkHasMoment(b *testing.B) {
	text := []byte(prose(64 << 10))
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		hasMoment(text, stampsNow())
	}
}
