# SPDX-License-Identifier: Apache-2.0
"""A real monitor process and real ranks for tests; no launcher."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._monitor import messages
from nvidia_resiliency_ext.fault_tolerance._monitor.handle import MonitorHandle
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.rundir import RunDir

PROGRAM = Path(__file__).parent.parent / "programs" / "commanded_rank.py"
LIMIT_S = 60.0


class Rank:
    """A process that runs `commanded_rank.py`."""

    def __init__(self, socket_path, rank=0, env=None):
        given = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "NVRX_"))}
        given |= {"FT_RANK_MONITOR_IPC_SOCKET": str(socket_path), "RANK": str(rank)}
        given |= {"LOCAL_RANK": str(rank), **(env or {})}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env=given,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        self.pid = self.process.pid

    def order(self, line):
        """Give an order without waiting for its answer."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self):
        """Return the next line of the rank."""
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        assert ready, "the rank did not answer"
        return self.process.stdout.readline().strip()

    def do(self, *lines):
        """Give orders and return the last answer; each must succeed."""
        answer = ""
        for line in lines:
            self.order(line)
            answer = self.answer()
            assert answer.startswith("ok"), answer
        return answer.removeprefix("ok").strip()

    def do_last(self, *lines):
        """Give orders; nobody waits for the answer to the last, which the rank may not outlive."""
        self.do(*lines[:-1])
        self.order(lines[-1])

    def wait_dead(self, limit_s=LIMIT_S):
        """Wait until the process ended; return its return code."""
        return self.process.wait(limit_s)

    def close(self):
        """Kill it and its children."""
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Node:
    """A monitor with its run directory, and the ranks of the test."""

    def __init__(self, record_dir, count=1, env=None, order=None, **config):
        self.env = env or {}
        self.order = order or {}
        self.run_dir = RunDir.create("test")
        self.record_dir = record_dir
        self.run_id = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.config = FaultToleranceConfig(log_level=10, **config).to_dict()
        self.paths = [self.run_dir.socket_path(f"rmon{i}.sock") for i in range(count)]
        self.ranks = []
        self.messages = []
        self.monitor = self.start_monitor()

    def start_monitor(self):
        """Start a monitor at the node's paths."""
        self.monitor = MonitorHandle.launch(
            self.config,
            self.paths,
            ready_limit_s=30.0,
            run_id=self.run_id,
            run_dir=self.run_dir.path,
            record_dir=str(self.record_dir),
            cycle=3,
            host="testhost",
            env={**os.environ, **self.env},
            **self.order,
        )
        return self.monitor

    @contextlib.contextmanager
    def unjudged(self):
        """Hold the monitor: what ranks do in the block it evaluates afterwards."""
        os.kill(self.monitor.child.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.monitor.child.pid, signal.SIGCONT)

    def rank(self, index=0, env=None):
        """Start a rank that belongs to the run."""
        rank = Rank(self.paths[index], index, {"NVRX_RUN_ID": self.run_id, **(env or {})})
        self.ranks.append(rank)
        return rank

    def expect(self, kind, limit_s=LIMIT_S):
        """Wait for the monitor's next message of a kind; earlier other ones are kept."""
        deadline = time.monotonic() + limit_s
        while True:
            for message in self.messages:
                if isinstance(message, kind):
                    self.messages.remove(message)
                    return message
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"no {kind.__name__}, only {self.messages}"
            select.select([self.monitor], [], [], remaining)
            self.messages += self.monitor.receive()
            assert not self.monitor.is_over, "the monitor is gone"

    def hang(self):
        """Wait for the monitor's report of a hang."""
        return self.expect(messages.HangFound).report

    def connect(self, index=0):
        """Return a raw connection to a rank's socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(LIMIT_S)
        sock.connect(self.paths[index])
        return sock

    def close(self):
        """End everything."""
        for rank in self.ranks:
            rank.close()
        self.monitor.leave(60.0)
        shutil.rmtree(self.run_dir.path, ignore_errors=True)


def wait_gone(pid, limit_s=LIMIT_S):
    """Wait until a process that is not our child has ended."""
    deadline = time.monotonic() + limit_s
    while procfs.is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        select.select([], [], [], 0.02)


def wait_until(condition, limit_s=LIMIT_S):
    """Wait until a condition holds that nobody announces."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        select.select([], [], [], 0.02)
