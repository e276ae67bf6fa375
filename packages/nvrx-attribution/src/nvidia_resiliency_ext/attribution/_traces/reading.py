# SPDX-License-Identifier: Apache-2.0
"""Program of a worker process that reads dumps, and the JSON in which it hands them over.

The files are named on stdin, and one line answers for each. Memory of the process and CPU time per
file are limited: a small pickle can ask for any amount of either. A file that takes too long ends
the process, which the caller notices.

The ranks of a job call the same operations in the same groups. What they repeat, such as the
members of the world group, is written once per worker and named by its number from then on.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from itertools import islice
from typing import Any

from nvidia_resiliency_ext.attribution._core.files import open_confined
from nvidia_resiliency_ext.attribution._traces.dumps import Dump, Group, Op, Status, decode_dump
from nvidia_resiliency_ext.attribution._traces.pickles import UnsafePickleError, load_plain
from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError

__all__ = ["DumpReader", "DumpWriter", "main", "read_dump"]

_MEMORY_BYTES = 2 << 30
_TABLE_LIMIT = 100_000
_TABLE_CHARS = 64 << 20  # of the texts of groups


def main() -> None:
    """Answer each order with a dump or a finding, in the order of the list."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Its default action ends the process, in the middle of any operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A dump is a tree: counting references frees it, and looking for cycles doubles the time.
    gc.disable()
    orders = json.load(sys.stdin)
    # One byte more than the caller takes: it sees that it is too much.
    resource.setrlimit(resource.RLIMIT_FSIZE, (orders["total_bytes"] + 1,) * 2)
    writer = DumpWriter()
    _write({"ready": True})
    for file, rank in orders["jobs"]:
        signal.setitimer(signal.ITIMER_PROF, orders["cpu_s"])
        _write(_answer(file, rank, orders, writer))


def _answer(file: str, rank: int, orders: dict[str, Any], writer: DumpWriter) -> dict[str, Any]:
    for is_last in (False, True):
        try:
            dump = read_dump(file, rank, orders["limit_bytes"], orders["allowed_root"])
            return writer.row(dump)
        except UnsafePickleError as error:
            return {"finding": "unsafe_pickle", "text": str(error)}
        except PathOutsideRootsError as error:
            return {"finding": "outside_root", "text": str(error)}
        except (OSError, ValueError, MemoryError) as error:
            if isinstance(error, MemoryError):
                writer.forget()
            if is_last:
                return {"finding": "unreadable", "text": str(error) or "too large"}
        gc.collect()  # a hostile file before this one may have kept the memory, by cycles
    raise AssertionError


def read_dump(file: str, rank: int, limit_bytes: int, allowed_root: str | None) -> Dump:
    """Read one file, JSON or pickle; only for a process with limited memory and CPU time.

    Raises:
        UnsafePickleError: The pickle names more than plain containers.
        PathOutsideRootsError: The file leads outside of the root.
        ValueError: It is no dump.
        OSError: It cannot be read.
    """
    with open(open_confined(file, allowed_root), "rb") as opened:
        data = opened.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ValueError(f"larger than {limit_bytes} bytes")
    name = os.path.basename(file)
    if data[:64].lstrip()[:1] in (b"{", b"["):
        try:
            return decode_dump(json.loads(data), rank, name)
        except (RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"not JSON: {error}") from None
    return decode_dump(load_plain(data), rank, name)


class DumpWriter:
    """Turn dumps into JSON objects, for one `DumpReader` that gets them in the same order."""

    def __init__(self) -> None:
        self._shapes: dict[Any, int] = {}
        self._groups: dict[tuple[str, str, str], int] = {}
        self._group_chars = 0
        self._is_fresh = True

    def forget(self) -> None:
        """Name nothing by its number any more: the last row may not have been sent."""
        self._shapes.clear()
        self._groups.clear()
        self._group_chars = 0
        self._is_fresh = True

    def row(self, dump: Dump) -> dict[str, Any]:
        """Return a dump as a JSON object."""
        shapes, groups = self._shapes, self._groups
        if len(shapes) + len(groups) > _TABLE_LIMIT or self._group_chars > _TABLE_CHARS:
            self.forget()
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
        new_groups = _newest(groups, len(groups) - known_groups)
        self._group_chars += sum(len(members_text) for _, _, members_text in new_groups)
        row = {
            "rank": dump.rank,
            "file": dump.file,
            "host": dump.host,
            "version": dump.version,
            "fresh": self._is_fresh,
            "new_groups": new_groups,
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
        self._is_fresh = False
        return row


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


def _write(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _newest(table: dict[Any, int], count: int) -> list[Any]:
    """Return the keys that were added last, in their order."""
    return list(islice(reversed(table), count))[::-1]


def _nested(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in value)
