# SPDX-License-Identifier: Apache-2.0
"""The JSON form in which a worker process hands dumps back: tables of what repeats, and rows.

The ranks of a job call the same operations in the same groups. What they repeat, such as the
members of the world group, is written once per worker and named by its number from then on.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from nvidia_resiliency_ext.attribution._traces.dumps import Dump, Group, Op, Status

__all__ = ["DumpReader", "DumpWriter"]

_TABLE_LIMIT = 100_000


class DumpWriter:
    """Turn dumps into JSON objects, for one `DumpReader` that gets them in the same order."""

    def __init__(self) -> None:
        self._shapes: dict[Any, int] = {}
        self._groups: dict[tuple[str, str, str], int] = {}

    def row(self, dump: Dump) -> dict[str, Any]:
        """Return a dump as a JSON object."""
        shapes, groups = self._shapes, self._groups
        is_fresh = len(shapes) + len(groups) > _TABLE_LIMIT
        if is_fresh:
            shapes.clear()
            groups.clear()
        known_shapes, known_groups = len(shapes), len(groups)
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
        own = [
            groups.setdefault((group.name, group.desc, group.members_text), len(groups))
            for group in dump.groups
        ]
        return {
            "rank": dump.rank,
            "file": dump.file,
            "host": dump.host,
            "version": dump.version,
            "fresh": is_fresh,
            "new_groups": _newest(groups, len(groups) - known_groups),
            "groups": own,
            "status": [
                (key, item.enqueued, item.started, item.completed)
                for key, item in dump.status.items()
            ],
            "health": dump.health,
            "dropped": dump.dropped_entries,
            "new_shapes": _newest(shapes, len(shapes) - known_shapes),
            "ops": rows,
        }


class DumpReader:
    """Turn the JSON objects of one `DumpWriter` back into dumps."""

    def __init__(self) -> None:
        self._shapes: list[tuple[Any, ...]] = []
        self._groups: list[Group] = []

    def dump(self, row: dict[str, Any]) -> Dump:
        """Return the dump that `DumpWriter.row` wrote."""
        if row["fresh"]:
            self._shapes, self._groups = [], []
        self._groups += [Group(*texts) for texts in row["new_groups"]]
        self._shapes += [
            (
                *texts,
                (_nested(sizes[0]), _nested(sizes[1])),
                (tuple(dtypes[0]), tuple(dtypes[1])),
                tuple((str(frame[0]), str(frame[1]), int(frame[2])) for frame in frames),
            )
            for *texts, sizes, dtypes, frames in row["new_shapes"]
        ]
        dump = Dump(row["rank"], row["file"], row["host"], row["version"], health=row["health"])
        dump.groups = [self._groups[number] for number in row["groups"]]
        dump.status = {key: Status(*numbers) for key, *numbers in row["status"]}
        dump.dropped_entries = row["dropped"]
        for item in row["ops"]:
            pg_name, pg_desc, name, full_name, sizes, dtypes, frames = self._shapes[item[12]]
            dump.ops.append(
                Op(
                    *(item[0], item[1], pg_name, pg_desc, item[2], item[3], name, full_name),
                    *(item[4], item[5], item[6], item[7] and (item[7][0], item[7][1]), item[8]),
                    *(sizes, dtypes, frames, item[9], item[10], item[11]),
                )
            )
        return dump


def _newest(table: dict[Any, int], count: int) -> list[Any]:
    """Return the keys that were added last, in their order."""
    return list(islice(reversed(table), count))[::-1]


def _nested(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in value)
