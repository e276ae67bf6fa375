# SPDX-License-Identifier: Apache-2.0
"""Ranks without torch as real processes, for tests of the monitor."""

import contextlib
import json
import os
import selectors
import signal
import time
from pathlib import Path

from nvidia_resiliency_ext.inprocess._monitor import messages
from nvidia_resiliency_ext.inprocess._monitor.store_threads import CONNECT
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import PidHandle, pidfd_available

PROGRAM = str(Path(__file__).parents[1] / "programs" / "monitor_rank.py")
LIMIT_S = 60.0
TORCHS_OWN = {
    "host_name": "127.0.0.1",
    "is_master": False,
    "wait_for_workers": False,
}


def with_torch(port) -> dict[str, str]:
    """Return settings of a call whose store is connected to by torch."""
    kwargs = messages.dump_kwargs({**TORCHS_OWN, "port": port})
    return {"store_factory": "torch.distributed:TCPStore", "store_kwargs": kwargs}


class RankProcess:
    """One rank; `do` sends it a line, `expect` waits for one."""

    def __init__(self, lab, rank, settings, *options, environ=None) -> None:
        self.rank = rank
        self.logs = lab.tmp
        self._fork_server = lab.fork_server
        theirs, to_rank = os.pipe()
        from_rank, output = os.pipe()
        self._input = os.fdopen(to_rank, "wb", buffering=0)
        self._output = os.fdopen(from_rank, "rb", buffering=0)
        with open(os.devnull, "w") as nowhere:
            self.pid = self._fork_server.start(
                [PROGRAM, rank, lab.world, json.dumps(settings), *options],
                [theirs, output, nowhere.fileno()],
                environ={**lab.environ, **(environ or {})},
            )
        os.close(theirs)
        os.close(output)
        os.set_blocking(from_rank, False)
        self.lines: list[list] = []
        self.received: list[list] = []
        self._rest = b""

    def do(self, *what) -> None:
        self._input.write((json.dumps(what) + "\n").encode())

    def expect(self, name, *begin, limit_s=LIMIT_S) -> list:
        """Return the next line that begins like this; what others say is kept."""
        deadline = time.monotonic() + limit_s
        wanted = [name, *begin]
        while True:
            for line in self.lines:
                if line[: len(wanted)] == wanted:
                    self.lines.remove(line)
                    return line
                if line[0] == "error" and name != "error":
                    raise AssertionError(f"rank {self.rank}: {line}")
            if not self._read(deadline - time.monotonic()):
                logs = "".join(path.read_text() for path in self.logs.glob("monitor-*.log"))
                raise AssertionError(
                    f"rank {self.rank} says no {wanted}, but {self.received}\n{logs}"
                )

    def _read(self, timeout_s) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            if timeout_s <= 0 or not selector.select(timeout_s):
                return False
        data = self._output.read(65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [json.loads(line) for line in lines]
        self.lines += found
        self.received += found
        return bool(data)

    def kill(self, number=signal.SIGKILL) -> None:
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):  # its end is told a moment later
                os.kill(self.pid, number)

    def is_running(self) -> bool:
        return self._fork_server.is_running(self.pid)

    def wait(self, limit_s=LIMIT_S) -> int:
        return self._fork_server.wait(self.pid, limit_s)

    def close(self) -> None:
        self._input.close()
        self.kill(signal.SIGCONT)
        try:
            self.wait(5.0)
        except TimeoutError:
            self.kill()
            self.wait(5.0)
        self._output.close()


class Lab:
    """A call of `world` ranks on one node, or on several that share this host."""

    def __init__(self, fork_server, port, world, tmp_path, **settings) -> None:
        self.fork_server = fork_server
        self.world = world
        self.port = port
        self.tmp = tmp_path
        self.ranks: dict[int, RankProcess] = {}
        self.all: list[RankProcess] = []
        self.monitors: set[int] = set()
        self.prefix = f"nvrx/{os.getpid()}/{time.monotonic_ns()}/"
        self.settings = {
            "prefix": self.prefix,
            "store_factory": CONNECT,
            "store_kwargs": messages.dump_kwargs({"host": "127.0.0.1", "port": port}),
            "last_call_wait_s": 0.2,
            "log_file": str(tmp_path / "monitor-{rank}.log"),
            **settings,
        }
        names = ("TMPDIR", "XDG_RUNTIME_DIR", "NVRX_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
        self.environ = {k: v for k, v in os.environ.items() if k not in names}
        # Unix sockets have short paths: not below pytest's folder.
        self.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), SLURM_JOB_ID=self.prefix
        )

    def start(self, *ranks, node="", options=(), environ=None) -> list[RankProcess]:
        """Start ranks; those with the same `node` share a monitor."""
        extra = {"NVRX_CYCLE": node, **(environ or {})} if node else environ
        made = [RankProcess(self, rank, self.settings, *options, environ=extra) for rank in ranks]
        self.all += made
        self.ranks.update(zip(ranks, made, strict=True))
        return made

    def attach(self, *ranks) -> list[int]:
        """Let ranks come to their monitor; return its number for each."""
        for rank in ranks:
            self.ranks[rank].do("attach")
        pids = [self.ranks[rank].expect("attached")[1] for rank in ranks]
        self.monitors.update(pids)
        return pids

    def begin(self, iteration, going=None) -> None:
        """Let all ranks that go on begin an iteration."""
        going = sorted(self.ranks) if going is None else going
        for number, rank in enumerate(going):
            self.ranks[rank].do("begin", iteration, number, len(going), list(going))
        for rank in going:
            self.ranks[rank].expect("begun", iteration)

    def up(self, world=None, **kwargs) -> list[RankProcess]:
        """Start all ranks on one node and begin iteration 0."""
        made = self.start(*range(self.world if world is None else world), **kwargs)
        self.attach(*range(len(made)))
        self.begin(0)
        return made

    def finish(self, iteration, going) -> None:
        """Complete an iteration and leave."""
        for rank in going:
            self.ranks[rank].do("completed")
        for rank in going:
            self.ranks[rank].expect("Completed", iteration)
            self.ranks[rank].do("leave", False)
            assert self.ranks[rank].expect("left") == ["left", True]
            self.ranks[rank].do("close")
            threads = self.ranks[rank].expect("closed")[1]
            assert "nvrx-link" not in threads

    def monitor_pid(self, rank) -> int:
        """Return the number of the monitor that a rank is connected to."""
        self.ranks[rank].do("monitor")
        pid = self.ranks[rank].expect("monitor")[1]
        self.monitors.add(pid)
        return pid

    def end_ranks(self) -> None:
        """End all ranks."""
        for rank in self.all:
            rank.close()

    def close(self) -> None:
        """End everything, and see that the monitors end, too."""
        self.end_ranks()
        for pid in self.monitors:
            assert wait_gone(pid, 20.0), f"monitor {pid} is still there"


def wait_gone(pid, limit_s) -> bool:
    """Wait for a process that is not our child; if it stays, kill it and return False."""
    try:
        handle = PidHandle(pid)
    except ProcessLookupError:
        return True
    with handle:
        if handle.wait(limit_s):
            return True
        handle.signal(signal.SIGKILL)
        handle.wait(5.0)
        return False


def open_files(pid) -> set[str]:
    """Return what a process holds open, by the kernel's names."""
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed by now: a process that imports opens and closes files.
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(each))
    return found


def environ_of_monitor(pid) -> dict[str, int]:
    """Return what a monitor holds: descriptors and threads."""
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


__all__ = [
    "LIMIT_S",
    "Lab",
    "RankProcess",
    "environ_of_monitor",
    "open_files",
    "pidfd_available",
    "procfs",
    "wait_gone",
]
