# SPDX-License-Identifier: Apache-2.0
"""A rank that does what its input says, one call per line, and answers each line.

Lines: `init`, `shutdown`, `beat`, `open NAME`, `close NAME`, `close_all`, `cycle NAME PERIOD_S`
(cycle a section until the end of input or death), `iteration N` (as Megatron's), `handler` (write
`terminated` at SIGTERM and stay), `child` (a grandchild in a session of its own that ignores
SIGTERM), `fork_call NAME` (call it in a forked child), `load JSON`, `dump_off`, `dump_own`, `save`.
"""

import json
import os
import signal
import subprocess
import sys
import time
import types

from nvidia_resiliency_ext.fault_tolerance.rank_monitor_client import (
    RankMonitorClient,
    RankMonitorClientError,
)

client = RankMonitorClient()


def set_iteration(value):
    """Put an iteration where Megatron has it."""
    name = "megatron.training.global_vars"
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module._GLOBAL_ARGS = types.SimpleNamespace(curr_iteration=int(value))


def cycle(name, period_s):
    """Open and close a section for ever."""
    while True:
        client.start_section(name)
        time.sleep(float(period_s))
        client.end_section(name)


def start_grandchild():
    """Start a process that leaves our session and ignores SIGTERM."""
    code = "import signal,time;signal.signal(15,1);print('up',flush=True);time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    return child.pid


def call_in_fork(name):
    """Call a method of the inherited client in a forked child; return what it raised."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            getattr(client, name)()
            answer = "nothing was raised"
        except RankMonitorClientError as exc:
            answer = str(exc)
        os.write(write_fd, answer.encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


def survive_sigterm():
    """Stay alive at SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: print("terminated", flush=True))


def keep_dump_signal():
    """Use the monitor's dump signal for something of our own."""
    signal.signal(signal.SIGRTMIN + 5, lambda *_: print("own", flush=True))


CALLS = {
    "init": client.init_workload_monitoring,
    "shutdown": client.shutdown_workload_monitoring,
    "beat": client.send_heartbeat,
    "open": client.start_section,
    "close": client.end_section,
    "close_all": client.end_all_sections,
    "cycle": cycle,
    "iteration": set_iteration,
    "handler": survive_sigterm,
    "child": start_grandchild,
    "fork_call": call_in_fork,
    "save": client.should_checkpoint,
    "load": lambda text: client.load_state_dict(json.loads(text)),
    "dump_own": keep_dump_signal,
    "dump_off": lambda: signal.signal(signal.SIGRTMIN + 5, signal.SIG_IGN),
}

for line in sys.stdin:
    call, *arguments = line.split(None, 2)
    try:
        result = CALLS[call](*[argument.strip() for argument in arguments])
    except (RankMonitorClientError, ValueError) as exc:
        print(f"error {exc}", flush=True)
    else:
        print("ok" if result is None else f"ok {result}", flush=True)
