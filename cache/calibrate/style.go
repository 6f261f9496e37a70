package calibrate

// chartColours are for light and for dark. Blue and orange are told apart by those who cannot tell red from green.
const chartColours = `:root{color-scheme:light dark;--paper:#fff;--ink:#1c2430;--soft:#5b6675;--rule:#e3e7ec;--edge:#aab3bf;--same:#2563c9;--different:#d9570d;--accent:#0c7a5b;--card:#f6f8fa}
@media (prefers-color-scheme:dark){:root{--paper:#12161c;--ink:#e6eaf0;--soft:#9aa5b4;--rule:#262d37;--edge:#4a5462;--same:#74a8ff;--different:#ff9a56;--accent:#4fd1a5;--card:#1a2029}}
@media print{:root{color-scheme:light;--paper:#fff;--ink:#111;--soft:#444;--rule:#ddd;--edge:#999;--same:#2563c9;--different:#d9570d;--accent:#0c7a5b;--card:#fff}}
`

// chartStyle is what the classes of drawings mean.
const chartStyle = `svg{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
svg text{fill:var(--ink)}svg .tick,svg .note{fill:var(--soft)}svg .tick{font-size:12px}svg .title{font-size:15px;font-weight:600}svg .strong{font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
svg .mid{text-anchor:middle}svg .end{text-anchor:end}
svg .paper{fill:var(--paper)}svg .grid{stroke:var(--rule)}svg .edge{stroke:var(--edge)}
svg path{fill:none}
svg .fill-same{fill:var(--same);fill-opacity:.45;stroke:var(--same);stroke-width:1.5}
svg .fill-different{fill:var(--different);fill-opacity:.4;stroke:var(--different);stroke-width:1.5}
svg .ghost-same{stroke:var(--same);stroke-dasharray:3 3}svg .ghost-different{stroke:var(--different);stroke-dasharray:3 3}
svg .ghost-key{fill:none;stroke:var(--soft);stroke-dasharray:3 3}
svg .fill-band{fill:var(--ink);fill-opacity:.13;stroke:none}
svg .line-error{stroke:var(--ink);stroke-width:2.2}svg .line-plain{stroke:var(--soft);stroke-width:1.6;stroke-dasharray:6 4}
svg .line-same{stroke:var(--same);stroke-width:2.2}svg .line-different{stroke:var(--different);stroke-width:2.2}
svg .limit{stroke:var(--accent);stroke-width:2}svg .budget{stroke:var(--different);stroke-width:1.5;stroke-dasharray:2 4}
svg .whisker{stroke:var(--accent);stroke-width:5;stroke-opacity:.4}svg .dot{fill:var(--accent);stroke:var(--paper);stroke-width:2}
svg .chance{stroke:var(--edge);stroke-dasharray:2 4}svg .rest{stroke:var(--soft);stroke-dasharray:2 3}
`
