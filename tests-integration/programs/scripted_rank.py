# SPDX-License-Identifier: Apache-2.0
"""A rank without torch that does what it is told, when it is told; it says what it does in a file.

    scripted_rank.py OUT [--last-cycle N] [--client] [--like-torch] [CYCLE:RANK:DEED[=VALUE] ...]

A rank without a deed works until it is ended; in the last cycle it takes three steps and leaves.
"""

import argparse
import contextlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

STEP_S = 0.02


class Rank:
    """This process: who it is, its file, its client if it has one."""

    def __init__(self, options):
        self.options = options
        self.rank = int(os.environ["RANK"])
        self.cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.client = None
        self.file = (options.out / f"progress_{self.cycle}_{self.rank}").open("a", buffering=1)

    def say(self, *words):
        """Write a line."""
        self.file.write(" ".join(str(word) for word in words) + "\n")

    def connect(self):
        """Open the session with the monitor."""
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        self.client = RankMonitorClient()
        self.client.init_workload_monitoring()
        self.say("connected")

    def step(self):
        """Work a little and show that we are alive."""
        if self.client is not None:
            self.client.send_heartbeat()
            with self.client.section("step"):
                time.sleep(STEP_S)
        else:
            time.sleep(STEP_S)

    def work(self):
        """Work until ended, or three steps in the last cycle."""
        self.say("working")
        done = 0
        while self.cycle < self.options.last_cycle or done < 3:
            self.step()
            done += 1
            if done == 1:
                self.say("stepped")
        self.say("done")


# --- deeds: what a rank does once it has started (before or after it connects) -------------------


def leave(rank, value):
    """Leave with an exit code."""
    rank.say("leaving")
    sys.exit(int(value or 0))


def leave_after_file(rank, value):
    """Leave with 0 when a file appears."""
    rank.say("waiting")
    path = rank.options.out / value
    while not path.exists():
        rank.step()
    sys.exit(0)


def fall(rank, value):
    """Raise an exception."""
    raise RuntimeError(value or "this rank falls")


def die(rank, value):
    """Die by SIGKILL."""
    rank.say("dying", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def last_words(rank, value):
    """Write 1 MiB of lines to stdout and a word to stderr, then die: `kill` or `exit`."""
    rank.say("dying", time.monotonic())
    line = b"w" * 63 + b"\n"
    left = memoryview(line * ((1 << 20) // len(line)))
    while left:
        left = left[os.write(1, left) :]
    os.write(2, b"the last word")
    if value == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_a_daemon(rank, value):
    """Start a process that keeps our streams open and cannot be found by its group; then die."""
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    os.write(1, b"no newline")
    os.kill(os.getpid(), signal.SIGKILL)


def talk(rank, value):
    """Write so many bytes of lines to stdout once a file appears, and say when that is done."""
    rank.say("waiting")
    while not (rank.options.out / "talk").exists():
        rank.step()
    os.write(1, (b"t" * 63 + b"\n") * (int(value) // 64))
    rank.say("talked")
    rank.work()


def print_variable(rank, value):
    """Say the value of a variable; then work."""
    rank.say("variable", os.environ.get(value, "-"))
    rank.work()


def die_together(rank, value):
    """Die by SIGKILL at the monotonic time that a file names, to the microsecond."""
    rank.say("waiting")
    path = rank.options.out / value
    while not path.exists() or not path.read_text():
        rank.step()
    moment = float(path.read_text())
    while time.monotonic() < moment:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def stop(rank, value):
    """Be stopped inside a section."""
    rank.client.send_heartbeat()
    rank.say("stopping", time.monotonic())
    with rank.client.section("stuck"):
        os.kill(os.getpid(), signal.SIGSTOP)


def hang(rank, value):
    """Sleep for ever inside a section, once a file appears if one is named."""
    if value:
        rank.say("waiting")
        while not (rank.options.out / value).exists():
            rank.step()
    rank.client.send_heartbeat()
    rank.say("hanging", time.monotonic())
    with rank.client.section("stuck"):
        while True:
            time.sleep(60)


def hang_outside(rank, value):
    """Keep the outer section open for ever while steps go on inside it."""
    with rank.client.section("outer"):
        rank.say("hanging", time.monotonic())
        while True:
            rank.step()


def fall_silent(rank, value):
    """Send a few heartbeats, or as many as are wanted, and then none."""
    for _ in range(int(value or 5)):
        rank.client.send_heartbeat()
        time.sleep(STEP_S)
    rank.say("hanging", time.monotonic())
    while True:
        time.sleep(60)


def ignore_term(rank, value):
    """Take no notice of SIGTERM and SIGINT and work on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank.say("deaf")
    rank.work()


def leave_on_term(rank, value):
    """Leave with a code, 0 by default, at SIGTERM or SIGINT."""

    def on_term(number, frame):
        rank.say("told", time.monotonic())
        raise SystemExit(int(value or 0))

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_term)
    rank.say("ready")
    rank.work()


def have_deaf_children(rank, value):
    """Start children that ignore all that can be ignored, one of them in a session of its own."""
    code = (
        "import signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    for apart in (False, True):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=apart
        )
        child.stdout.readline()
        rank.say("child", child.pid)
    rank.work()


def close_socket(rank, value):
    """Close the connection to the monitor under the client and work on."""
    os.close(rank.client.rank_monitor_socket.fileno())
    rank.say("closed")
    rank.work()


def send_bytes(rank, value):
    """Send bytes that are no message to the monitor, then work on."""
    evil = rank.options.out / "evil"

    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {evil}",))

    payload = pickle.dumps(Evil())
    floods = {
        "garbage": [os.urandom(4096), b"\xff" * 70000],
        "pickle": [payload, len(payload).to_bytes(4, "big") + payload],
        "silence": [b""],
    }
    sockets = []
    for data in floods[value]:
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(os.environ["FT_RANK_MONITOR_IPC_SOCKET"])
        with contextlib.suppress(OSError):
            peer.sendall(data)
        sockets.append(peer)
    rank.say("sent")
    rank.work()


def ask(rank, value):
    """Ask the launcher for something, then die."""
    from nvidia_resiliency_ext.fault_tolerance import (
        RankMonitorClient,
        WorkloadAction,
        WorkloadControlRequest,
    )

    client = rank.client or RankMonitorClient()
    if rank.client is None:
        client.init_workload_monitoring()
    client.send_workload_control_request(
        WorkloadControlRequest(action=WorkloadAction[value], description="asked by a test")
    )
    rank.say("asked")
    sys.exit(1)


BEFORE_CONNECT = {"leave-early": leave, "die-early": die, "fall": fall}
AFTER_CONNECT = {
    "leave": leave,
    "leave-after": leave_after_file,
    "die": die,
    "die-together": die_together,
    "last-words": last_words,
    "leave-a-daemon": leave_a_daemon,
    "talk": talk,
    "print-variable": print_variable,
    "stop": stop,
    "hang": hang,
    "hang-outside": hang_outside,
    "fall-silent": fall_silent,
    "ignore-term": ignore_term,
    "leave-on-term": leave_on_term,
    "deaf-children": have_deaf_children,
    "close-socket": close_socket,
    "send": send_bytes,
    "ask": ask,
}


def parse_arguments():
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--last-cycle", type=int, default=0)
    parser.add_argument("--client", action="store_true")
    parser.add_argument("--like-torch", action="store_true", help="map a file of torch's name")
    parser.add_argument("deeds", nargs="*")
    return parser.parse_intermixed_args()


def map_torch(folder):
    """Map a file that is called like torch's library: what makes the launcher keep standbys."""
    own = folder / f"rank{os.environ['RANK']}-{os.getpid()}"
    own.mkdir()
    path = own / "libtorch_cpu.so"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def deed_of(rank):
    """Return the name and value of what this rank is to do, if anything."""
    for text in rank.options.deeds:
        cycle, number, deed = text.split(":", 2)
        if cycle in ("*", str(rank.cycle)) and number in ("*", str(rank.rank)):
            name, _, value = deed.partition("=")
            return name, value
    return "", ""


def main():
    """Run the rank."""
    rank = Rank(parse_arguments())
    torch_map = map_torch(rank.options.out) if rank.options.like_torch else None
    rank.say("started", os.getpid())
    name, value = deed_of(rank)
    if name in BEFORE_CONNECT:
        BEFORE_CONNECT[name](rank, value)
    if rank.options.client:
        rank.connect()
    if name in AFTER_CONNECT:
        AFTER_CONNECT[name](rank, value)
    else:
        rank.work()
    if torch_map is not None:
        torch_map.close()


if __name__ == "__main__":
    main()
