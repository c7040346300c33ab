"""The report's stylesheet: one column, system typefaces, light and dark by the reader's setting."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1c2128; --muted: #626b76; --grid: #e4e6e9;
  --accent: #1f5fa8; --notice: #7a4b00; --notice-page: #fff6e3;
  --series-1: #1f5fa8; --series-2: #c2571a; --series-3: #2c8a57; --series-4: #8a4fb0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1c2026; --ink: #e7eaee; --muted: #98a2ae; --grid: #30363e;
    --accent: #74aef0; --notice: #f2c879; --notice-page: #2c2413;
    --series-1: #74aef0; --series-2: #f09a5d; --series-3: #6fce9a; --series-4: #c79be8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 72px; }
header p { color: var(--muted); margin: 4px 0 0; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.2rem; margin: 48px 0 12px; letter-spacing: -0.005em; }
h3 { font-size: 1rem; margin: 24px 0 8px; }
p.lead { color: var(--muted); margin: 0 0 12px; max-width: 70ch; }
.figures {
  display: grid; gap: 12px; margin: 24px 0 0;
  grid-template-columns: repeat(auto-fit, minmax(132px, 1fr));
}
.figure, .plot, .table, figure {
  background: var(--card); border: 1px solid var(--grid); border-radius: 10px;
}
.figure { padding: 14px 16px; }
.figure b {
  display: block; white-space: nowrap; font-size: 1.45rem; font-weight: 600; line-height: 1.25;
}
.figure b small { font-size: 0.9rem; font-weight: 400; color: var(--muted); }
.figure span { color: var(--muted); font-size: 0.86rem; }
.plots {
  display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fill, minmax(min(318px, 100%), 1fr));
}
.plot { padding: 10px 12px; }
.plot svg { display: block; width: 100%; height: auto; }
.table { overflow-x: auto; margin: 0 0 14px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 12px 14px 4px; }
caption span { color: var(--muted); font-weight: 400; }
th, td { padding: 6px 14px; text-align: right; white-space: nowrap; font-size: 0.93rem; }
th:first-child, td:first-child { text-align: left; }
.wide th, .wide td { padding: 6px 7px; white-space: normal; font-size: 0.88rem; }
thead th { color: var(--muted); font-weight: 500; border-bottom: 1px solid var(--grid); }
tbody tr:nth-child(even) { background: color-mix(in srgb, var(--grid) 28%, transparent); }
tfoot td { border-top: 1px solid var(--grid); font-weight: 600; }
dl {
  display: grid; gap: 4px 28px; margin: 0;
  grid-template-columns: repeat(auto-fill, minmax(420px, 1fr));
}
dl div { display: grid; grid-template-columns: 12.5rem 1fr; }
@media (max-width: 520px) {
  dl { grid-template-columns: 1fr; }
  dl div { grid-template-columns: 9rem 1fr; }
}
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0 0 14px; padding: 12px; }
figure img { display: block; width: 100%; height: auto; border-radius: 6px; background: #fff; }
figcaption { padding: 10px 4px 0; color: var(--muted); font-size: 0.93rem; }
figcaption strong { color: var(--ink); }
ul.notices {
  list-style: none; margin: 20px 0 0; padding: 10px 16px; border-radius: 10px;
  color: var(--notice); background: var(--notice-page); overflow-wrap: anywhere;
}
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--accent); }
pre {
  overflow-x: auto; background: var(--card); border: 1px solid var(--grid); border-radius: 10px;
  padding: 14px 16px; font: 0.82rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
}
@media print { .table { overflow: visible; } }
@media print { body { background: #fff; } .plot, figure, .table { break-inside: avoid; } }
"""
