// Package ladder is the room of degradation: rungs that make a saturated fleet's answers cheaper in
// an order that hurts least, and cut-offs that refuse requests before anything is spent. See
// DESIGN.md for what holds.
package ladder
