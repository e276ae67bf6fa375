# SPDX-License-Identifier: Apache-2.0
"""The JSON form in which a worker process hands a dump back: tables of what repeats, and rows."""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.attribution._traces.dumps import Dump, Group, Op, Status

__all__ = ["dump_from_row", "dump_to_row"]

# Texts that the dumps of all ranks repeat, such as the members of the world group: kept once.
_texts: dict[str, str] = {}
_TEXT_LIMIT = 100_000


def dump_to_row(dump: Dump) -> dict[str, Any]:
    """Return a dump as a JSON object."""
    shapes: dict[Any, int] = {}
    rows = [
        [
            *(op.record_id, op.pg_id, op.seq, op.p2p_seq, op.state, op.is_done, op.is_p2p),
            *(op.peers, op.created_ns, op.started_ns, op.completed_ns, op.op_id),
            shapes.setdefault(
                (op.pg_name, op.pg_desc, op.name, op.full_name, op.sizes, op.dtypes, op.frames),
                len(shapes),
            ),
        ]
        for op in dump.ops
    ]
    return {
        "rank": dump.rank,
        "file": dump.file,
        "host": dump.host,
        "version": dump.version,
        "groups": [(group.name, group.desc, group.members_text) for group in dump.groups],
        "status": [
            (key, item.enqueued, item.started, item.completed) for key, item in dump.status.items()
        ],
        "health": dump.health,
        "dropped": dump.dropped_entries,
        "shapes": list(shapes),
        "ops": rows,
    }


def dump_from_row(row: dict[str, Any]) -> Dump:
    """Return the dump that `dump_to_row` wrote."""
    if len(_texts) > _TEXT_LIMIT:
        _texts.clear()
    shapes = [
        (
            *(_texts.setdefault(text, text) for text in (pg_name, pg_desc, name, full_name)),
            (_nested(sizes[0]), _nested(sizes[1])),
            (tuple(dtypes[0]), tuple(dtypes[1])),
            tuple((str(frame[0]), str(frame[1]), int(frame[2])) for frame in frames),
        )
        for pg_name, pg_desc, name, full_name, sizes, dtypes, frames in row["shapes"]
    ]
    dump = Dump(row["rank"], row["file"], row["host"], row["version"], health=row["health"])
    dump.groups = [
        Group(name, _texts.setdefault(desc, desc), _texts.setdefault(members, members))
        for name, desc, members in row["groups"]
    ]
    dump.status = {key: Status(*numbers) for key, *numbers in row["status"]}
    dump.dropped_entries = row["dropped"]
    for item in row["ops"]:
        pg_name, pg_desc, name, full_name, sizes, dtypes, frames = shapes[item[12]]
        dump.ops.append(
            Op(
                *(item[0], item[1], pg_name, pg_desc, item[2], item[3], name, full_name),
                *(item[4], item[5], item[6], item[7] and (item[7][0], item[7][1]), item[8]),
                *(sizes, dtypes, frames, item[9], item[10], item[11]),
            )
        )
    return dump


def _nested(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in value)
