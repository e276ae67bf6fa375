# SPDX-License-Identifier: Apache-2.0
"""The record that ranks on several hosts keep in a shared folder: who did what there, and when.

Each rank appends whole lines to `record.jsonl`; every write to the folder is told there first. A
test can see from it whether two groups of ranks were at work at once (`helpers/many_nodes.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

RECORD = "record.jsonl"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one, never half."""
    partial = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def cycle() -> int:
    """Return the job's cycle; torchrun's count is that of one node's agent."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(os.environ.get("NVRX_CYCLE", count))


class Record:
    """What this rank does in the shared folder."""

    def __init__(self, folder: Path) -> None:
        """Open the record; say that the rank has started."""
        self.folder = folder
        self.host = socket.gethostname()
        # The tasks of an array are queued again one by one: no start of the whole job.
        is_array = "SLURM_ARRAY_TASK_ID" in os.environ
        self._known = {
            "attempt": 0 if is_array else int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            "cycle": cycle(),
            "rank": int(os.environ["RANK"]),
            "host": self.host,
            "pid": os.getpid(),
        }
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(folder / RECORD, flags, 0o644)
        self.say("start", world=int(os.environ["WORLD_SIZE"]))

    def say(self, what: str, **more: object) -> None:
        """Append a line; it is whole, whoever else writes at the same time."""
        line = {**self._known, "what": what, "t": time.monotonic(), **more}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def save(self, name: str, data: bytes, **more: object) -> None:
        """Write a file of the folder whole, and tell before and after."""
        self.say("save", name=name, **more)
        replace_file(self.folder / name, data)
        self.say("saved", name=name, **more)


@contextlib.contextmanager
def no_section(_: str):
    """Stand in for `RankMonitorClient.section` where nobody monitors."""
    yield


class Monitor:
    """The rank monitor client, or nothing when no monitor is there."""

    def __init__(self, wanted: bool) -> None:
        """Connect when it is wanted and there is one."""
        self.client = None
        if wanted and "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
            from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

            self.client = RankMonitorClient()
            self.client.init_workload_monitoring()
        self.section = self.client.section if self.client else no_section

    def beat(self) -> None:
        """Send a heartbeat."""
        if self.client:
            self.client.send_heartbeat()

    def asks_to_leave(self) -> bool:
        """Say whether all ranks are to save now and leave: the job is preempted."""
        return self.client is not None and self.client.should_checkpoint()

    def ask_to_exclude_this_node(self) -> None:
        """Ask the launcher to leave this node out from the next round on."""
        from nvidia_resiliency_ext.fault_tolerance import WorkloadAction, WorkloadControlRequest

        assert self.client is not None
        request = WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "a test asks for it")
        self.client.send_workload_control_request(request)

    def close(self) -> None:
        """End the session."""
        if self.client:
            self.client.shutdown_workload_monitoring()
