# SPDX-License-Identifier: Apache-2.0
"""A rank that trains as a data-parallel program does, without torch: it starts in 50 ms.

    counting_rank.py SHARED --steps N [--step-ms MS] [--save-every N] [--client] [--leave-on-term]
                     [--talk] [--exclude HOST] [--patient]

A file `steps` in the shared folder says another number of steps while they run; those that are done
already are not undone. SIGUSR1 is an exception in the rank. With `--talk` each step prints a line.
With `--exclude` the ranks on that host ask to leave it out after some steps, and fail. A rank that
misses another one fails; with `--patient` it waits to be ended.

Rank 0 listens at MASTER_PORT and takes in the ranks of its own cycle and no others. Each step, all
ranks send it what their part of the step's samples comes to, it adds that up into a new state, and
all go on when they have it (so each step is a barrier). The state depends on all that came before
and on nothing else, not even on how many ranks share the samples: `state_after` says what it must
be. Rank 0 saves it in the shared folder, from where the next cycle goes on. With `--client` all
save once more and leave when the launcher asks for it, with `--leave-on-term` also at SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from shared_record import Monitor, Record, cycle

SAMPLES_PER_STEP = 64
FIRST_STATE = "0" * 16
STATE = "state.json"
RESULT = "result.json"
STEPS = "steps"
RETRY_S = 0.01
EXCLUDED_AT = 10


def share_of(step: int, rank: int, world: int) -> int:
    """Return what a rank's part of a step's samples comes to."""
    samples = range(rank, SAMPLES_PER_STEP, world)
    return sum(int(hashlib.sha256(f"{step}.{n}".encode()).hexdigest()[:8], 16) for n in samples)


def next_state(state: str, step: int, total: int) -> str:
    """Return the state after a step."""
    return hashlib.sha256(f"{state} {step} {total}".encode()).hexdigest()[:16]


def state_after(steps: int) -> str:
    """Return the state that any undisturbed or well recovered run has after its last step."""
    state = FIRST_STATE
    for step in range(steps):
        state = next_state(state, step, share_of(step, 0, 1))
    return state


class Peer:
    """One end of a connection between ranks; messages are lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lines = connection.makefile("rb")

    def send(self, message: dict) -> None:
        """Send a message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict:
        """Wait for a message, for ever if need be, as a collective does."""
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("a rank has left")
        return json.loads(line)


class Group:
    """The ranks of one cycle, joined through rank 0."""

    def __init__(self, record: Record) -> None:
        """Join them; on rank 0, wait for all of them."""
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.me = {
            "run": os.environ.get("TORCHELASTIC_RUN_ID", ""),
            "cycle": str(cycle()),
            "world": self.world,
        }
        self.record = record
        self.is_told = False
        self.peers: list[Peer] = []
        if self.rank == 0:
            self._take_in()
        else:
            self.peers = [self._join()]

    def _take_in(self) -> None:
        """Wait for every other rank of this cycle; a rank of another one is an error."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", int(os.environ["MASTER_PORT"])))
            listener.listen(self.world)
            taken: dict[int, Peer] = {}
            while len(taken) < self.world - 1:
                peer = Peer(listener.accept()[0])
                who = peer.receive()
                rank = who.pop("rank")
                if who != self.me or rank in taken:
                    self.record.say("foreign_rank", who={**who, "rank": rank}, me=self.me)
                    raise SystemExit(f"rank {rank} of {who} came to {self.me}")
                taken[rank] = peer
        self.peers = [taken[rank] for rank in sorted(taken)]

    def _join(self) -> Peer:
        """Connect to rank 0, which may not listen yet."""
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        while True:
            try:
                peer = Peer(socket.create_connection(address))
            except OSError as error:
                if error.errno not in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ETIMEDOUT):
                    raise
                time.sleep(RETRY_S)
            else:
                peer.send({**self.me, "rank": self.rank})
                return peer

    def from_first(self, message: dict | None) -> dict:
        """Hand a message of rank 0 to all."""
        if self.rank:
            return self.peers[0].receive()
        assert message is not None
        for peer in self.peers:
            peer.send(message)
        return message

    def step(self, state: str, step: int, steps: int) -> dict:
        """Do one step together; return the new state, the steps wanted, and whether all leave."""
        own = share_of(step, self.rank, self.world)
        if self.rank:
            self.peers[0].send({"step": step, "share": own, "told": self.is_told})
            return self.from_first(None)
        total, leave = own, self.is_told
        for peer in self.peers:
            message = peer.receive()
            if message["step"] != step:
                self.record.say("foreign_rank", who=message, me=self.me)
                raise SystemExit(f"step {message['step']} came in step {step}")
            total += message["share"]
            leave = leave or message["told"]
        state = next_state(state, step, total)
        return self.from_first({"state": state, "steps": steps, "leave": leave})

    def leave_on_term(self) -> None:
        """Let SIGTERM ask all to leave after the step at hand."""

        def told(*_: object) -> None:
            self.record.say("told")
            self.is_told = True

        signal.signal(signal.SIGTERM, told)


def wanted(options: argparse.Namespace, done: int) -> int:
    """Return how many steps there are to be, when so many are done."""
    path = options.shared / STEPS
    return max(done, int(path.read_text())) if path.exists() else int(options.steps)


def fail(*_: object) -> None:
    """Raise as a bug in the program would."""
    raise RuntimeError("asked to fail")


def train(options: argparse.Namespace, record: Record, monitor: Monitor) -> None:
    """Count to the last step from wherever the last save is."""
    with monitor.section("setup"):
        group = Group(record)
        if options.leave_on_term:
            group.leave_on_term()
        saved = {"step": 0, "state": FIRST_STATE}
        path = options.shared / STATE
        if group.rank == 0 and path.exists():
            saved = json.loads(path.read_text())
        saved = group.from_first({**saved, "steps": wanted(options, int(saved["step"]))})
    step, state, steps = int(saved["step"]), str(saved["state"]), int(saved["steps"])
    leave = False
    record.say("resume", step=step)
    while step < steps and not leave:
        with monitor.section("step"):
            time.sleep(options.step_ms / 1000)
            done = group.step(state, step, wanted(options, step + 1))
        state, steps = str(done["state"]), int(done["steps"])
        step += 1
        record.say("step", step=step)
        if options.talk:
            print("step", step, flush=True)
        if options.exclude == record.host and step == EXCLUDED_AT:
            monitor.ask_to_exclude_this_node()
            raise SystemExit("asked to leave this host out")
        monitor.beat()
        leave = monitor.asks_to_leave() or bool(done["leave"])
        if group.rank == 0 and (leave or step % options.save_every == 0 or step == steps):
            with monitor.section("checkpoint"):
                data = json.dumps({"step": step, "state": state}).encode()
                record.save(STATE, data, step=step)
    if group.rank == 0 and step == steps:
        result = {"step": step, "weights_sha256": state, "world": group.world}
        record.save(RESULT, json.dumps(result).encode(), step=step)
    # Nobody leaves before the result is there: the end of one rank is the end of the cycle.
    group.from_first({} if group.rank == 0 else None)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shared", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--client", action="store_true", help="sections and heartbeats")
    parser.add_argument("--leave-on-term", action="store_true", help="save and leave at SIGTERM")
    parser.add_argument("--ignore-usr1", action="store_true")
    parser.add_argument("--exclude", default="", help="the host that is to be left out")
    parser.add_argument("--patient", action="store_true", help="do not fail of another's end")
    parser.add_argument("--talk", action="store_true", help="print a line in each step")
    options = parser.parse_args()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN if options.ignore_usr1 else fail)
    record = Record(options.shared)
    monitor = Monitor(options.client)
    try:
        train(options, record, monitor)
    except ConnectionError:
        while options.patient:
            signal.pause()
        raise
    monitor.close()
    record.say("end")


if __name__ == "__main__":
    main()
