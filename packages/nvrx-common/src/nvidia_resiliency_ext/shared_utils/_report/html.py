# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page; its style and script are the files beside this one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape

from .timeline import (
    CATEGORIES,
    Lane,
    Span,
    Timeline,
    both,
    clock_time,
    coarsen,
    duration,
    ending,
    goodput_text,
    merge,
    plain,
    short_cause,
    size,
)

_ROW_PX = 22
_AXIS_PX = 24
_MOST_RANKS = 256
_MOST_ROWS = 1000
_FINEST = 4000  # spans closer than this fraction of the whole are drawn as one
_MOST_SPANS = 40_000  # of all lanes together
_FEWEST_SPANS = 100
_TICK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_TICKS = 8


def render_html(timeline: Timeline) -> str:
    """Return the report of `timeline` as one self-contained HTML page."""
    noun = "jobs" if timeline.is_of_many_jobs else "job"
    title = f"{noun} {timeline.job_id}" if timeline.job_id else noun
    sections = (_tiles, _where, _chart, _faults, _restarts, _cycles, _remarks, _notes)
    parts = [section(timeline) for section in sections]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        " style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{_safe(title)}</title><style>{_file('page.css')}</style></head><body>"
        f"<header><h1>{_safe(title)}</h1><p>{clock_time(timeline.start)} to"
        f" {clock_time(timeline.end)}, {_safe(ending(timeline))}</p>"
        '<button id="theme" type="button">light / dark</button></header><main>'
        f"{''.join(parts)}</main><script>{_file('page.js')}</script></body></html>\n"
    )


def _file(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read()


def _safe(text: str) -> str:
    return escape(plain(text, limit=2000), quote=True)


def _tiles(timeline: Timeline) -> str:
    layers = timeline.restarts_by_layer
    saved = timeline.checkpoints.saved
    facts = [
        (goodput_text(timeline), "goodput"),
        (duration(timeline.wall_s), "wall time"),
        (str(len(timeline.faults)), "faults"),
        (str(layers["in-job"]), "in-job restarts"),
        (str(layers["in-process"]), "in-process restarts"),
        (f"{saved}", f"checkpoints saved, {size(timeline.checkpoints.bytes)}"),
        (f"{timeline.ranks}", f"ranks on {len(timeline.hosts)} node(s)"),
    ]
    tiles = (f'<div class="tile"><b>{_safe(b)}</b><span>{_safe(t)}</span></div>' for b, t in facts)
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _where(timeline: Timeline) -> str:
    """Return one bar of the whole time and its legend with figures."""
    if timeline.wall_s <= 0:
        return ""
    used = [(name, timeline.seconds[name]) for name in CATEGORIES if timeline.seconds[name] > 0]
    pieces, legend = [], []
    for name, seconds in used:
        share = seconds / timeline.wall_s
        text = f"{CATEGORIES[name]}: {duration(seconds)}, {share:.1%}"
        pieces.append(
            f'<i{_hatch(name)} style="width:{share:.4%};background-color:var(--{name})"'
            f' title="{_safe(text)}"></i>'
        )
        legend.append(_legend_item(name, text))
    summary = "; ".join(
        f"{CATEGORIES[name]} {seconds / timeline.wall_s:.1%}" for name, seconds in used
    )
    return (
        "<section><h2>Where the time went</h2>"
        f'<div class="bar" role="img" aria-label="{_safe(summary)}">{"".join(pieces)}</div>'
        f'<ul class="legend">{"".join(legend)}</ul></section>'
    )


def _legend_item(name: str, text: str) -> str:
    return f'<li><i{_hatch(name)} style="background-color:var(--{name})"></i>{_safe(text)}</li>'


def _hatch(name: str) -> str:
    return ' class="hatch"' if name == "lost_work" else ""


def _chart(timeline: Timeline) -> str:
    """Return the lanes: each node, and under it its ranks."""
    if timeline.wall_s <= 0:
        return ""
    lanes, left_out = _ordered(timeline)
    height = _AXIS_PX + _ROW_PX * len(lanes)
    names = "".join(
        f'<div class="{"node" if lane.rank is None else "rank"}" title="{_safe(lane.label)}">'
        f"{_safe(lane.label)}</div>"
        for lane in lanes
    )
    most = max(_FEWEST_SPANS, _MOST_SPANS // max(1, len(lanes)))
    rows = "".join(_row(timeline, lane, number, most) for number, lane in enumerate(lanes))
    legend = "".join(_legend_item(name, label) for name, label in CATEGORIES.items())
    more = f'<p class="dim">{left_out} more ranks are not drawn.</p>' if left_out else ""
    return (
        '<section><div class="tools"><button id="out" type="button" aria-label="zoom out">'
        '&minus;</button><button id="in" type="button" aria-label="zoom in">+</button></div>'
        '<h2>Nodes and ranks over time</h2><div class="chart" tabindex="0">'
        f'<div class="names"><div class="dim">time</div>{names}</div><div class="scroll">'
        f'<svg id="lanes" role="img" aria-label="Timeline of {len(lanes)} lanes" width="100%"'
        f' height="{height}"><defs><pattern id="hatch" width="6" height="6"'
        ' patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6"'
        ' fill="var(--lost_work)"/><rect width="2" height="6" fill="var(--card)"'
        f' opacity="0.55"/></pattern></defs>{_axis(timeline, height)}{rows}</svg></div></div>'
        f'<ul class="legend">{legend}<li>&times; fault</li></ul>{more}</section>'
    )


def _ordered(timeline: Timeline) -> tuple[list[Lane], int]:
    """Put each node's ranks under it; of very many ranks those with faults come first."""
    chosen: Sequence[Lane] = timeline.lanes
    if len(chosen) > _MOST_RANKS:
        chosen = sorted(chosen, key=lambda lane: (not lane.faults, lane.rank))[:_MOST_RANKS]
    lanes: list[Lane] = []
    for node in timeline.nodes:
        own = [lane for lane in chosen if lane.host == node.host]
        lanes += [node, *sorted(own, key=lambda lane: lane.rank or 0)]
    return lanes, len(timeline.lanes) - len(chosen)


def _axis(timeline: Timeline, height: int) -> str:
    wanted = timeline.wall_s / _TICKS
    step = next((step for step in _TICK_STEPS if step >= wanted), None) or max(1, round(wanted))
    marks = []
    for number in range(int(timeline.wall_s / step) + 1):
        x = 100 * number * step / timeline.wall_s
        marks.append(f'<line class="grid" x1="{x:.3f}%" x2="{x:.3f}%" y1="18" y2="{height}"/>')
        marks.append(f'<text x="{x:.3f}%" y="13" dx="2">{_tick(number * step)}</text>')
    return "".join(marks)


def _tick(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _row(timeline: Timeline, lane: Lane, number: int, most: int) -> str:
    """Draw one lane of at most so many spans: a rectangle for each, a cross per fault."""
    y = _AXIS_PX + number * _ROW_PX
    spans = merge(lane.spans, timeline.wall_s / _FINEST)
    drawn = coarsen(spans, timeline.start, timeline.end, most)
    shapes = [_rectangle(timeline, span, y) for span in drawn]
    for fault in lane.faults[:most]:
        x = _share(timeline, fault.at)
        middle = y + _ROW_PX / 2
        text = f"{fault.cause} {fault.what}, {clock_time(fault.at)}"
        shapes.append(
            f'<svg x="{x:.3f}%" y="{middle:.0f}" overflow="visible"><path class="fault"'
            f' d="M-4-4L4 4M-4 4L4-4"/><title>{_safe(text)}</title></svg>'
        )
    return "".join(shapes)


def _rectangle(timeline: Timeline, span: Span, y: int) -> str:
    left, right = _share(timeline, span.start), _share(timeline, span.end)
    fill = "url(#hatch)" if span.name == "lost_work" else f"var(--{span.name})"
    note = f" ({span.note})" if span.note else ""
    text = f"{CATEGORIES[span.name]}{note}: {duration(span.seconds)} from {clock_time(span.start)}"
    return (
        f'<rect x="{left:.3f}%" width="{max(right - left, 0.02):.3f}%" y="{y + 3}"'
        f' height="{_ROW_PX - 6}" fill="{fill}"><title>{_safe(text)}</title></rect>'
    )


def _share(timeline: Timeline, at: float) -> float:
    return 100 * min(1.0, max(0.0, (at - timeline.start) / timeline.wall_s))


def _table(title: str, heads: Sequence[str], rows: Sequence[Iterable[str]]) -> str:
    """Return a table; a head that begins with ``#`` has figures under it."""
    if not rows:
        return ""
    kinds = [' class="n"' if head.startswith("#") else "" for head in heads]
    top = "".join(
        f'<th scope="col"{kind}>{_safe(head.lstrip("#"))}</th>'
        for kind, head in zip(kinds, heads, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_safe(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows[:_MOST_ROWS]
    )
    more = len(rows) - _MOST_ROWS
    rest = f'<p class="dim">{more} more rows are not shown.</p>' if more > 0 else ""
    return (
        f'<section><h2>{_safe(title)}</h2><div class="wide"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{rest}</section>"
    )


def _faults(timeline: Timeline) -> str:
    rows = [
        (
            clock_time(fault.at),
            str(fault.cycle),
            "" if fault.rank is None else str(fault.rank),
            fault.host,
            fault.cause,
            both(fault.what, fault.detail),
            fault.detected_by,
            "" if fault.late_s is None else duration(max(0.0, fault.late_s)),
        )
        for fault in timeline.faults
    ]
    causes = ", ".join(f"{count} {cause}" for cause, count in timeline.faults_by_cause.items())
    heads = ("time", "#cycle", "#rank", "node", "cause", "what", "found by", "#late")
    return _table(f"Faults: {causes}", heads, rows)


def _restarts(timeline: Timeline) -> str:
    rows = [
        (
            clock_time(restart.at),
            restart.layer,
            str(restart.cycle),
            short_cause(restart.cause, timeline.faults),
            duration(restart.down_s),
            ", ".join(f"{name} {duration(seconds)}" for name, seconds in restart.phases.items()),
            duration(restart.lost_s),
        )
        for restart in timeline.restarts
    ]
    heads = ("time", "layer", "#cycle", "cause", "#down", "phases", "#lost work")
    return _table("Restarts", heads, rows)


def _cycles(timeline: Timeline) -> str:
    rows = [
        (
            str(cycle.number),
            clock_time(cycle.start),
            duration(cycle.end - cycle.start),
            "" if cycle.world_size is None else str(cycle.world_size),
            ", ".join(cycle.hosts),
            short_cause(cycle.reason, timeline.faults),
            short_cause(cycle.result, timeline.faults)
            or ("" if cycle.is_ended else "no end recorded"),
        )
        for cycle in timeline.cycles
    ]
    heads = ("#cycle", "start", "#length", "#ranks", "nodes", "reason", "result")
    return _table("Cycles", heads, rows)


def _remarks(timeline: Timeline) -> str:
    rows = [
        (clock_time(remark.at), remark.host, remark.kind, remark.text)
        for remark in timeline.remarks
    ]
    return _table("Remarks", ("time", "node", "kind", "what"), rows)


def _notes(timeline: Timeline) -> str:
    if not timeline.notes:
        return ""
    items = "".join(f"<li>{_safe(note)}</li>" for note in timeline.notes)
    return f'<section><h2>Notes</h2><ul class="notes">{items}</ul></section>'
