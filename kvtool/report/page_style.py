"""The style sheet of the page: light and dark, on screen and on paper, no file but the page."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --line: #d0d7de; --band: #f6f8fa;
  --better: #116329; --worse: #a40e26;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --soft: #9da7b1; --paper: #0d1117; --line: #30363d; --band: #161b22;
    --better: #56d364; --worse: #ff7b72;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
}
main { max-width: 75rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 {
  font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere;
}
p, ul { max-width: 48rem; }
.soft, figcaption, caption { color: var(--soft); }
.warning { border-left: 4px solid var(--worse); padding: .25rem .75rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: .75rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font: .88em/1.45 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
pre {
  background: var(--band); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere;
}
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .22rem .7rem; text-align: right; white-space: nowrap; }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; font-weight: 600; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tbody th { font-weight: 500; }
tbody tr.first > * { border-top: 1px solid var(--line); }
tbody tr:hover > * { background: var(--band); }
td.words { text-align: left; white-space: normal; }
.better { color: var(--better); }
.worse, .failed { color: var(--worse); }
.failed { font-weight: 600; }
small { color: var(--soft); }
small.better { color: var(--better); }
small.worse { color: var(--worse); }
figure { margin: 1rem 0 1.5rem; overflow-x: auto; break-inside: avoid; }
figure svg {
  display: block; max-width: 100%; height: auto; background: #ffffff; border-radius: 4px;
}
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
@media print {
  :root {
    --ink: #000000; --soft: #444444; --paper: #ffffff; --line: #bbbbbb; --band: #ffffff;
    --better: #116329; --worse: #a40e26;
  }
  main { max-width: none; padding: 0; }
  body { font-size: 10pt; }
  .scroll, figure { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .1rem .3rem; white-space: normal; }
  th:first-child { position: static; }
  h2 { break-after: avoid; }
  tr { break-inside: avoid; }
  figure svg { max-height: 24cm; }
}
"""
