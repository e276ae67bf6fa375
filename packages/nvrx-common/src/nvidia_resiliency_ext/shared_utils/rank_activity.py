# SPDX-License-Identifier: Apache-2.0
"""Classifies what one rank is doing from its stacks and from the kernel's view.

All of it is pure but for `inspect_kernel`, which reads /proc.

Kernel state alone does not tell a rank that waits for its peers from one that waits for a lock:
both sleep in a futex. Three facts together do: the innermost call of the Python stack (a
collective of torch, or the program's own code), the kernel function in which the main thread
sleeps, and whether a thread of gloo has a collective pending.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from . import procfs

__all__ = [
    "NO_STACK",
    "Activity",
    "Call",
    "Frame",
    "Kernel",
    "Stack",
    "classify",
    "in_words",
    "inspect_kernel",
    "main_frames",
    "main_stack",
    "stack_of",
]

MAX_PLACE = 160


class Activity(enum.Enum):
    """Activity of a rank, as far as it matters for finding the culprit of a hang."""

    FAILED = "failed"
    STOPPED = "stopped"
    LEFT = "left"
    WORKING = "working"
    UNKNOWN = "unknown"
    WAITING = "waiting"


class Call(enum.Enum):
    """Kind of the innermost Python call of the main thread."""

    COLLECTIVE = "collective"
    DEVICE = "device"
    OWN = "own"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Kernel:
    """State of a process as the kernel reports it.

    Attributes:
        state: State letter of the main thread; `?` when the process is gone.
        wchan: Kernel function in which the main thread sleeps, or "".
        is_pending: Whether a gloo thread is in a collective; None when that cannot be seen.
        has_gpu: Whether the process has threads of CUDA or NCCL.
    """

    state: str
    wchan: str = ""
    is_pending: bool | None = None
    has_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """A main thread's kind of `call` and its own `place`, such as `train.py:41 in load`."""

    call: Call = Call.NONE
    place: str = ""


NO_STACK = Stack()
"""Where the stack is not known."""

Frame = tuple[str, int, str]
"""File, line and function of a Python frame."""

MAX_THREADS = 256
_STOPPED_STATES = frozenset("Tt")
_GLOO_THREAD = "pt_gloo_runloop"
_GPU_THREADS = ("pt_nccl_", "cuda-", "cuda0")
# Numbers of `futex` on x86-64, on aarch64, and of the older and the 64-bit call on 32 bits.
_FUTEX = frozenset({202, 98, 240, 422})
_FUTEX_TIMEOUT = 4  # place of the time limit in what `procfs.syscall` returns

_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<name>.*)')
_LIBRARY = re.compile(
    r"/site-packages/|/torch/|/deepspeed/comm/|/p2p_communication\.py|/lib/python3\.\d+/|^<frozen "
)
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
# Frames between a program and the call that blocks, which say nothing themselves.
_PASSED_OVER = ("/torch/_ops.py", "/torch/_tensor.py", "/torch/utils/_contextlib.py")
_COLLECTIVES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/deepspeed/comm/",
    "/p2p_communication.py",
)
_NO_COLLECTIVES = (
    "/torch/distributed/checkpoint/",
    "/torch/distributed/elastic/",
    "/torch/distributed/run.py",
)
_DEVICE_CALLS = (
    ("/torch/autograd/graph.py", "_engine_run_backward"),
    ("/torch/autograd/__init__.py", "backward"),
)
_SYNCHRONIZES = frozenset({"synchronize", "wait", "wait_event", "wait_stream"})


def main_frames(dump: str) -> list[Frame]:
    """Read the main thread's frames, innermost first, from `dump`, which faulthandler wrote.

    The signal is handled by the main thread unless it blocks it, so that is the current thread.
    """
    frames: list[Frame] = []
    is_current = False
    for line in dump.splitlines():
        if _THREAD.fullmatch(line):
            is_current = line.startswith("Current")
            frames = [] if is_current else frames
        elif is_current and (found := _FRAME.fullmatch(line)):
            frames.append((found["file"], int(found["line"]), found["name"]))
    return frames


def main_stack(dump: str) -> Stack:
    """Return the state of the main thread in `dump`, a text that faulthandler wrote."""
    return stack_of(main_frames(dump))


def stack_of(frames: Sequence[Frame]) -> Stack:
    """Return the state that `frames` show, innermost first.

    Example:
        >>> stack_of([("/job/train.py", 41, "load"), ("/job/train.py", 80, "main")])
        Stack(call=<Call.OWN: 'own'>, place='train.py:41 in load')
    """
    shown = [frame for frame in frames if not frame[0].endswith(_PASSED_OVER)]
    if not shown:
        return NO_STACK
    own = next((frame for frame in shown if not _LIBRARY.search(frame[0])), shown[0])
    place = f"{own[0].rpartition('/')[2]}:{own[1]} in {own[2]}"[:MAX_PLACE]
    return Stack(_call_of(*shown[0]), place)


def _call_of(file: str, _line: int, name: str) -> Call:
    if any(part in file for part in _NO_COLLECTIVES):
        return Call.OWN
    if any(part in file for part in _COLLECTIVES):
        return Call.COLLECTIVE
    waits = "/torch/cuda/" in file and name in _SYNCHRONIZES
    runs = any(file.endswith(end) and name == called for end, called in _DEVICE_CALLS)
    return Call.DEVICE if waits or runs else Call.OWN


def inspect_kernel(pid: int) -> Kernel:
    """Return the state of process `pid` in the kernel, from its `MAX_THREADS` oldest threads."""
    stat = procfs.read_stat(pid)
    if stat is None or not stat.running:
        return Kernel("?")
    if stat.state in _STOPPED_STATES:
        return Kernel(stat.state, procfs.wchan(pid) or "")
    threads = procfs.threads(pid, MAX_THREADS)
    gloo = [thread for thread in threads if thread.name == _GLOO_THREAD]
    pending = [answer for thread in gloo if (answer := _in_collective(pid, thread)) is not None]
    is_pending = any(pending) if pending else None
    has_gpu = any(thread.name.startswith(_GPU_THREADS) for thread in threads)
    return Kernel(stat.state, procfs.wchan(pid) or "", is_pending, has_gpu)


def _in_collective(pid: int, thread: procfs.Thread) -> bool | None:
    """Return whether a gloo thread waits for a peer (a futex with a limit); None if not told."""
    call = procfs.syscall(pid, thread.tid)
    if call is None:
        return None
    is_idle = len(call) > _FUTEX_TIMEOUT and call[0] in _FUTEX and call[_FUTEX_TIMEOUT] == 0
    return not is_idle


def classify(kernel: Kernel, stack: Stack) -> Activity:
    """Return the activity of a rank from `kernel`, its process, and `stack`, its main thread.

    | main thread | in a collective | in backward, device wait | in its own code | no stack |
    | --- | --- | --- | --- | --- |
    | stopped | STOPPED | STOPPED | STOPPED | STOPPED |
    | runs | UNKNOWN (1) | WORKING (2) | WORKING (2) | UNKNOWN |
    | in a futex, collective pending | WAITING | WAITING | WAITING | WAITING |
    | in a futex, nothing pending | WAITING | UNKNOWN (1) | WORKING (2) | UNKNOWN |
    | in a futex, cannot be seen | WAITING | WAITING | UNKNOWN | UNKNOWN |
    | in a poll or a socket | WAITING | UNKNOWN | WORKING (2) | UNKNOWN |
    | sleeps for a time, as torch does between two tries | WAITING | WORKING | WORKING | WORKING |
    | reads, waits for a disk | UNKNOWN | WORKING | WORKING | WORKING |

    With a GPU (1) is WAITING and (2) UNKNOWN: CUDA spins or sleeps while it waits for a kernel of
    NCCL, also under a line of the program such as `loss.item()`.
    """
    without_gpu, with_gpu = _ACTIVITIES[_row_of(kernel)][_COLUMNS.index(stack.call)]
    return with_gpu if kernel.has_gpu else without_gpu


def _row_of(kernel: Kernel) -> str:
    if kernel.state in _STOPPED_STATES:
        return "stopped"
    if kernel.state == "R":
        return "runs"
    if kernel.state not in ("S", "D"):
        return "unknown"
    if "futex" in kernel.wchan:
        return {True: "pending", False: "not pending", None: "in a futex"}[kernel.is_pending]
    polls = ("poll", "select", "sk_wait", "inet_", "tcp_", "wait_woken")
    is_polling = not kernel.wchan or any(word in kernel.wchan for word in polls)
    return "polls" if is_polling else "sleeps" if "nanosleep" in kernel.wchan else "reads"


_COLUMNS = (Call.COLLECTIVE, Call.DEVICE, Call.OWN, Call.NONE)
_STOPPED, _WORKING, _UNKNOWN, _WAITING = (
    (activity, activity)
    for activity in (Activity.STOPPED, Activity.WORKING, Activity.UNKNOWN, Activity.WAITING)
)
_SPINS = (Activity.UNKNOWN, Activity.WAITING)
_MAY_SPIN = (Activity.WORKING, Activity.UNKNOWN)
# The table of `classify`: each time without a GPU and with one.
_ACTIVITIES = {
    "stopped": (_STOPPED, _STOPPED, _STOPPED, _STOPPED),
    "unknown": (_UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN),
    "runs": (_SPINS, _MAY_SPIN, _MAY_SPIN, _UNKNOWN),
    "pending": (_WAITING, _WAITING, _WAITING, _WAITING),
    "not pending": (_WAITING, _SPINS, _MAY_SPIN, _UNKNOWN),
    "in a futex": (_WAITING, _WAITING, _UNKNOWN, _UNKNOWN),
    "polls": (_WAITING, _UNKNOWN, _MAY_SPIN, _UNKNOWN),
    "sleeps": (_WAITING, _WORKING, _WORKING, _WORKING),
    "reads": (_UNKNOWN, _WORKING, _WORKING, _WORKING),
}

_DOES = (
    ("nanosleep", "sleeps"),
    ("pipe_read", "waits to read from a pipe"),
    ("pipe_write", "waits to write to a pipe"),
    ("futex", "waits for a lock"),
    ("locks", "waits for a file lock"),
    ("do_wait", "waits for a child process"),
    ("poll", "waits for a descriptor"),
    ("select", "waits for a descriptor"),
)


def in_words(activity: Activity, kernel: Kernel, stack: Stack) -> str:
    """Describe `activity`, the result of `classify` for `kernel` and `stack`, in words."""
    where = f" in {stack.place}" if stack.place else ""
    if activity is Activity.STOPPED:
        return "is stopped (SIGSTOP or a debugger)" if kernel.state == "T" else "is being traced"
    if activity is Activity.WAITING:
        return f"waits for its peers{where}"
    if kernel.state == "R":
        return f"runs{where}" if where else "runs"
    if kernel.state == "D":
        return f"is in an uninterruptible kernel call ({kernel.wchan or 'unknown'}){where}"
    does = next((words for part, words in _DOES if part in kernel.wchan), "waits")
    if "futex" in kernel.wchan and activity is Activity.UNKNOWN:
        does = "waits"
    return f"{does}{where} ({kernel.wchan})" if kernel.wchan else f"{does}{where}"
