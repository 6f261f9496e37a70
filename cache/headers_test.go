package cache

import (
	"strings"
	"testing"
)

func TestCountsHeader(t *testing.T) {
	for name, want := range map[string]bool{
		"Anthropic-Version": true, "Anthropic-Beta": true, "Openai-Organization": true, "Openai-Project": true, "Openai-Beta": true,
		"X-Mode": true, "Accept-Language": true, "Accept-Languages": false, "": true, "X": true, "Content-Language": true, "Accessible": true, "Hosts": true, "X-Headgate": true, "Ifs": true,
		"X-Custom-Accept": true, "Second": true, strings.Repeat("x", 300): true, "Authorization" + strings.Repeat("x", 60): true,

		"Accept": false, "Accept-Encoding": false, "Accept-Charset": false, "Content-Length": false, "Content-Type": false,
		"Content-Encoding": false, "Host": false, "User-Agent": false, "X-Stainless-Lang": false, "X-Stainless-Retry-Count": false,
		"X-Request-Id": false, "Traceparent": false, "Tracestate": false, "Baggage": false, "B3": false, "X-B3-Traceid": false,
		"Uber-Trace-Id": false, "X-Amzn-Trace-Id": false, "X-Cloud-Trace-Context": false, "X-Datadog-Parent-Id": false, "Sentry-Trace": false,
		"X-Forwarded-For": false, "Forwarded": false, "Via": false, "X-Real-Ip": false, "Cf-Ray": false, "True-Client-Ip": false,
		"Sec-Fetch-Mode": false, "Origin": false, "Referer": false, "Dnt": false, "Cache-Control": false, "Pragma": false,
		"If-None-Match": false, "Priority": false, "Idempotency-Key": false, "Date": false, "Cookie": false, "Authorization": false,
		"X-Api-Key": false, "Api-Key": false, "Expect": false, "X-Headgate-Cache-Tags": false, "X-Headgate-" + strings.Repeat("x", 300): false,
		"Keep-Alive": false, "Connection": false, "Te": false, "Trailer": false, "Transfer-Encoding": false, "Upgrade": false,
		"Proxy-Authorization": false, "Proxy-Connection": false,
	} {
		for _, form := range []string{name, strings.ToLower(name), strings.ToUpper(name)} {
			if got := CountsHeader(form); got != want {
				t.Errorf("CountsHeader(%.80q) = %v", form, got)
			}
		}
	}
	if n := testing.AllocsPerRun(100, func() { CountsHeader("Anthropic-Dangerous-Direct-Browser-Access") }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
