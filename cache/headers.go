package cache

import "bytes"

// CountsHeader says whether a request header may change the answer and so belongs to
// Context.Header: any does that is not known not to. The case of the name does not matter.
func CountsHeader(name string) bool {
	var buf [64]byte // longer than any name below, so that what is cut is none of them
	lower := buf[:copy(buf[:], name)]
	for i, c := range lower {
		if 'A' <= c && c <= 'Z' {
			lower[i] = c + 'a' - 'A'
		}
	}
	if string(lower) == acceptLanguage {
		return true
	}
	return !headerNamed(lower) && !headerPrefixed(lower)
}

// acceptLanguage counts, unlike its family: the others say in what form the client can read an answer,
// which is JSON or, to stream, SSE; this one what it should say. A backend may go by it.
const acceptLanguage = "accept-language"

// headerNamed holds the names that do not count.
func headerNamed(lower []byte) bool {
	switch string(lower) {
	// Between two hops: about the connection.
	case "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
		"te", "trailer", "transfer-encoding", "upgrade", "http2-settings", "expect":
		return true
	// How the body is carried. What it says is in the body, and no answer to anything but
	// JSON is cached.
	case "content-length", "content-type", "content-encoding", "content-md5", "content-digest", "host", "date":
		return true
	// Who asks: the tenant, the user and the surface are fields of their own, taken from
	// what was authenticated.
	case "authorization", "x-api-key", "api-key", "cookie", "cookie2":
		return true
	// What software asks.
	case "user-agent", "origin", "referer", "dnt":
		return true
	// One request among others.
	case "x-request-id", "x-correlation-id", "idempotency-key", "priority":
		return true
	// Tracing.
	case "traceparent", "tracestate", "baggage", "b3", "uber-trace-id", "x-amzn-trace-id",
		"x-cloud-trace-context", "sentry-trace":
		return true
	// The way that the request came.
	case "forwarded", "via", "x-real-ip", "true-client-ip", "max-forwards":
		return true
	// Caches in between, of HTTP: ours is told by its own headers.
	case "cache-control", "pragma":
		return true
	}
	return false
}

// headerPrefixed holds the families of names that do not count.
func headerPrefixed(lower []byte) bool {
	for _, prefix := range [...]string{
		"accept",       // in what form the client can read it; see acceptLanguage
		"if-",          // conditions on a copy
		"x-stainless-", // the SDKs' platform, version and retries
		"x-b3-",        // tracing
		"x-datadog-",   // tracing
		"x-forwarded-", // the way
		"cf-",          // the way
		"sec-",         // a browser's context
		"x-headgate-",  // to us; what of it changes an answer is a field of its own
	} {
		if bytes.HasPrefix(lower, []byte(prefix)) {
			return true
		}
	}
	return false
}
