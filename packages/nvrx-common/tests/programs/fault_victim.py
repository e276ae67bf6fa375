# SPDX-License-Identifier: Apache-2.0
"""Gets one fault and tells what it sees of it, one JSON object per line.

Each scene dispatches the fault itself, when it is ready for it.

usage: fault_victim.py FAULT DELAY SCENE
"""

import ctypes
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time

from nvidia_resiliency_ext.shared_utils._faults import interpreter
from nvidia_resiliency_ext.shared_utils.inject_fault import (
    Fault,
    InjectedException,
    dispatch_fault_injection,
    maybe_raise_workload_exception,
)

_LIMIT_S = 20.0


def tell(**fields):
    # One write for a whole line: several threads tell something.
    os.write(1, json.dumps({**fields, "at": time.monotonic()}).encode() + b"\n")


def called_back():
    tell(what="callback", thread=threading.current_thread() is not threading.main_thread())
    CALLED_BACK.set()


def dispatch():
    """Dispatch the fault. It may come before this returns."""
    start = time.monotonic()
    tell(what="due", due=start + DELAY)
    HANDLES.append(dispatch_fault_injection(Fault[NAME], DELAY, called_back))
    tell(what="dispatched", took=time.monotonic() - start)


def alive():
    """Work until the fault ends it, as a training loop does."""
    dispatch()
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        time.sleep(0.005)


def exceptions():
    """Let exceptions of the main thread come, and go on after them."""
    try:
        alive()
    except InjectedException:
        tell(what="exception", thread=threading.current_thread() is threading.main_thread())
    except KeyboardInterrupt:
        tell(what="interrupt")
    tell(what="on", usr1=signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)


def workload():
    """Ask for the workload's exception at every step."""
    dispatch()
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        time.sleep(0.005)
        try:
            maybe_raise_workload_exception()
        except InjectedException:
            tell(what="exception", thread=True)
            break
    maybe_raise_workload_exception()
    tell(what="on")


def beat():
    """Beat in the main thread and in another one until killed."""

    def other():
        while True:
            tell(what="other")
            time.sleep(0.02)

    threading.Thread(target=other, daemon=True).start()
    dispatch()
    while True:
        tell(what="main")
        time.sleep(0.02)


def deaf():
    """Beat as well, and say of each SIGINT that it came."""
    signal.signal(signal.SIGINT, lambda *_: tell(what="interrupt"))
    beat()


def rests():
    """Compute until there were five gaps in which the main thread had no work to do."""
    dispatch()
    CALLED_BACK.wait(_LIMIT_S)
    found, end, last, used = 0, time.monotonic() + _LIMIT_S, time.monotonic(), time.thread_time()
    while found < 5 and time.monotonic() < end:
        now, now_used = time.monotonic(), time.thread_time()
        if now - last > 0.04 and now_used - used < 0.01:
            found += 1
        last, used = now, now_used
    end_fault(what="rests", found=found)


def burns():
    """Wait, doing nothing, until the process has used half a second of processor time."""
    dispatch()
    CALLED_BACK.wait(_LIMIT_S)
    used, end = time.process_time() + 0.5, time.monotonic() + _LIMIT_S
    while time.process_time() < used and time.monotonic() < end:
        time.sleep(0.01)
    end_fault(what="burns", found=time.process_time() >= used)


def fault_threads():
    """Return those of the fault that do not end."""
    found = [thread for thread in threading.enumerate() if "fault" in thread.name]
    for thread in found:
        thread.join(_LIMIT_S)
    return [thread.name for thread in found if thread.is_alive()]


def end_fault(**fields):
    ended = HANDLES[0].cancel()
    tell(**fields, ended=ended, threads=fault_threads())


def disk():
    """Write where the disk is full, and again once the fault is cancelled."""
    dispatch()
    path = os.path.join(os.environ["NVRX_FAULT_DISK_DIR"], "file")
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        try:
            with open(path, "ab") as file:
                file.write(bytes(65536))
            time.sleep(0.01)
        except OSError as error:
            tell(what="full", errno=error.errno)
            break
    end_fault(what="freed")
    with open(path, "wb") as file:
        file.write(bytes(1 << 20))


def network():
    """Hold a connection, a listener, a datagram socket and a pair that is not of the network."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    near, far = socket.socketpair()
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.settimeout(_LIMIT_S)
    dispatch()
    tell(
        what="read", data=client.recv(1).decode(), fds=[client.fileno() >= 0, server.fileno() >= 0]
    )
    far.sendall(b"x")
    tell(what="pair", data=near.recv(1).decode())
    # Sockets are shut down one after the other: this one may come after the client's.
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until:
        try:
            server.sendall(b"x")
        except BrokenPipeError:
            tell(what="broken")
            break
        except ConnectionResetError:
            continue
    try:
        socket.create_connection(listener.getsockname(), timeout=1).close()
    except ConnectionRefusedError:
        tell(what="refused")
    for each in (listener, client, server, near, far, datagram):
        each.close()


def memory():
    """Go on allocating beside the fault, with a bound on this process."""
    # Without memory nothing can be read but into what is there already.
    score, found = os.open("/proc/self/oom_score_adj", os.O_RDONLY), bytearray(8)
    resource.setrlimit(resource.RLIMIT_AS, (384 << 20, 384 << 20))
    dispatch()
    try:
        while True:
            bytes(8 << 20)
            time.sleep(0.005)
    except MemoryError:
        os.readv(score, [found])
    HANDLES[0].cancel()
    fault_threads()
    bytes(64 << 20)
    os.lseek(score, 0, os.SEEK_SET)
    tell(what="memory", score=int(found.strip(b"\0")), after=int(os.read(score, 8)))


def stuck():
    """Block the interpreter in C code that holds the GIL, across the moment of the fault.

    It is the fault's own thread that does so, before its first step: whichever thread stands still,
    none of this process can call back any more.
    """
    hold = ctypes.PyDLL(None).sleep
    tell(what="stuck")
    threading.setprofile(lambda *_: hold(int(_LIMIT_S)))
    dispatch()
    time.sleep(_LIMIT_S)
    tell(what="free")


resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
# A script's `&` leaves it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
NAME, DELAY, SCENE = sys.argv[1], float(sys.argv[2]), sys.argv[3]
HANDLES, CALLED_BACK = [], threading.Event()
if SCENE != "stuck":
    # A thread that the busy machine holds up is not taken for a stuck interpreter.
    interpreter._GRACE_WITH_CALLBACK_S = _LIMIT_S
globals()[SCENE]()
