// Package affinity decides which endpoint a request is best sent to, so that what it has in common with earlier ones is still in
// that endpoint's prefix cache. See DESIGN.md.
package affinity
