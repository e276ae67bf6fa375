# SPDX-License-Identifier: Apache-2.0
"""Owns the fixed parts of the HTML report: style sheet and script; knows no data."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

# The colours are told apart by people with any colour vision; lost work is hatched besides.
STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #ffffff; --ink: #1c1e21; --dim: #5f6670;
  --line: #dfe2e6; --productive: #2a9d6f; --lost_work: #c9a400; --checkpoint_stall: #e08214;
  --detection: #d43d2a; --stop: #b3589a; --rendezvous: #3468c0; --startup: #58a9dd;
  --restart_other: #7d6bb5; --unknown: #b9bec5; }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) { --bg: #15171a;
  --card: #1d2024; --ink: #e8eaed; --dim: #9aa3ad; --line: #33383f; --productive: #37b583;
  --lost_work: #d9b92e; --unknown: #5a616a; } }
:root[data-theme=dark] { color-scheme: dark; --bg: #15171a; --card: #1d2024; --ink: #e8eaed;
  --dim: #9aa3ad; --line: #33383f; --productive: #37b583; --lost_work: #d9b92e;
  --unknown: #5a616a; }
:root[data-theme=light] { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header { display: flex; flex-wrap: wrap; gap: 8px 24px; align-items: baseline; }
h1 { font-size: 22px; margin: 0; overflow-wrap: break-word; max-width: 100%; }
h2 { font-size: 16px; margin: 0 0 12px; }
header p { margin: 0; color: var(--dim); flex: 1 1 auto; }
button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 2px 10px; cursor: pointer; }
button:focus-visible, .chart:focus-visible { outline: 2px solid var(--rendezvous); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 20px; margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px;
  margin-top: 16px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 16px; }
.tile b { display: block; font-size: 21px; white-space: nowrap;
  line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span, .dim { color: var(--dim); font-size: 13px; }
.bar { display: flex; height: 26px; border-radius: 6px; overflow: hidden; background: var(--line); }
.bar i { display: block; min-width: 1px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; padding: 0;
  margin: 12px 0 0; font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
.chart { display: grid; grid-template-columns: max-content minmax(0, 1fr); max-height: 70vh;
  overflow: auto; }
.names { position: sticky; left: 0; z-index: 1; background: var(--card); padding-right: 12px;
  font-size: 12px; }
.names div { height: 22px; line-height: 22px; max-width: 180px; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }
.names div:first-child { height: 24px; }
.hatch { background-image: repeating-linear-gradient(135deg, transparent 0 4px,
  color-mix(in srgb, var(--card) 55%, transparent) 4px 6px); }
.names .node { font-weight: 600; }
.scroll { overflow-x: auto; } .scroll svg { display: block; min-width: 100%; }
svg text { fill: var(--dim); font-size: 11px; } svg .grid { stroke: var(--line); }
svg .fault { fill: none; stroke: var(--ink); stroke-width: 2; }
.tools { display: flex; gap: 8px; align-items: center; float: right; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: normal; }
th { white-space: nowrap; color: var(--dim); font-weight: 500; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.notes { padding-left: 18px; margin: 0; overflow-wrap: break-word; }
@media print { .tools, header button { display: none; } .chart { max-height: none; } }
"""

SCRIPT = """
"use strict";
const root = document.documentElement;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const chart = document.getElementById("lanes");
let zoom = 1;
function scale(factor) {
  zoom = Math.min(64, Math.max(1, zoom * factor));
  const box = chart.parentElement;
  const centre = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
  chart.setAttribute("width", (100 * zoom) + "%");
  box.scrollLeft = centre * box.scrollWidth - box.clientWidth / 2;
}
if (chart) {
  document.getElementById("in").addEventListener("click", () => scale(2));
  document.getElementById("out").addEventListener("click", () => scale(0.5));
}
"""
