# SPDX-License-Identifier: Apache-2.0
"""The first process of a test's host: it starts programs there, reaps them, and dies with the test.

    host_agent.py CONTROL [WATCHED]

It owns its namespaces: as their process 1 it takes every process of the host with it when it ends.
CONTROL is a descriptor of a SOCK_SEQPACKET socket whose messages are JSON, one answer for each
request. WATCHED is a pidfd: when that process dies, or CONTROL is closed, the host ends.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import selectors
import signal
import socket
import sys

MAX_MESSAGE = 1 << 20
MAX_DESCRIPTORS = 32
FIRST_PASSED = 3  # a child's passed descriptors are 3, 4, ...
MS_BIND, MS_REC = 4096, 16384
PRIVATE = ("/tmp", "/var/tmp", "/run", "/dev/shm")
OWN_FILES = "/run/host"
libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount, with an exception when it fails."""
    words = [os.fsencode(word) for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def hide(folder: str, keep: list[str], options: str) -> None:
    """Put an empty file system on a folder; the kept entries of the folder stay visible."""
    if not os.path.isdir(folder) or os.path.islink(folder):
        return
    before = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    mount("none", folder, "tmpfs", 0, options)
    for path in keep:
        if os.path.dirname(path) != folder:
            continue
        source = f"/proc/self/fd/{before}/{os.path.basename(path)}"
        if os.path.isdir(source):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT))
        mount(source, path, "", MS_BIND | MS_REC)
    os.close(before)


def mount_sys() -> None:
    """Mount /sys anew, so that it shows this host's devices; its control groups stay."""
    groups = os.open("/sys/fs/cgroup", os.O_PATH | os.O_DIRECTORY)
    # A user who is not root may not, when the outer one is partly covered: then it stays as it is.
    with contextlib.suppress(PermissionError):
        mount("none", "/sys", "sysfs")
        mount(f"/proc/self/fd/{groups}", "/sys/fs/cgroup", "", MS_BIND | MS_REC)
    os.close(groups)


def set_up(request: dict) -> dict:
    """Give the host its name, its boot and its own temporary folders."""
    socket.sethostname(request["name"])
    for folder in PRIVATE:
        size = f"size={request['shm_mb']}m" if folder == "/dev/shm" else "size=50%"
        mode = "0755" if folder == "/run" else "1777"
        hide(folder, request["keep"], f"mode={mode},{size}")
    mount_sys()
    os.mkdir(OWN_FILES)
    files = {
        "/etc/hostname": request["name"] + "\n",
        "/etc/hosts": request["hosts"],
        # No name service but that table: what it does not know is unknown, at once.
        "/etc/nsswitch.conf": "hosts: files\npasswd: files\ngroup: files\n",
        "/etc/machine-id": request["boot_id"].replace("-", "") + "\n",
        "/proc/sys/kernel/random/boot_id": request["boot_id"] + "\n",
    }
    for path, text in files.items():
        if os.path.exists(path):
            own = f"{OWN_FILES}/{os.path.basename(path)}"
            with open(own, "w", encoding="utf-8") as file:
                file.write(text)
            mount(own, os.path.realpath(path), "", MS_BIND)
    return {}


def write_hosts(request: dict) -> dict:
    """Write the host's table of names anew."""
    with open("/etc/hosts", "w", encoding="utf-8") as file:
        file.write(request["hosts"])
    return {}


def send_signal(request: dict) -> dict:
    """Send a signal to a process of this host, or (-1) to all of them."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(request["pid"], request["signal"])
        return {"sent": True}
    return {"sent": False}


def in_words(error: OSError) -> list:
    """Return what the test needs to raise the same error."""
    name = error.filename
    name = os.fsdecode(name) if isinstance(name, bytes) else name
    return [error.errno or errno.EIO, error.strerror or str(error), name]


def become(request: dict, descriptors: list[int], failure: int) -> None:
    """Turn this new child into the wanted program; on failure say why and leave."""
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # First out of the way, so that no copy lands on one that is still needed.
        failure = fcntl.fcntl(failure, fcntl.F_DUPFD_CLOEXEC, 200)
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 100) for number in descriptors]
        for target, number in enumerate(high):
            os.dup2(number, target, inheritable=True)
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        os.write(failure, json.dumps(in_words(error)).encode())
    finally:
        os._exit(127)


class Agent:
    """The loop: requests, children that end, the end of the test."""

    def __init__(self, control: int, watched: int | None) -> None:
        self.control = socket.socket(fileno=control)
        self.watched = watched
        self.reports: dict[int, int] = {}
        self.wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.set_inheritable(control, False)
        if watched is not None:
            os.set_inheritable(watched, False)

    def run(self) -> None:
        """Serve until the test is gone."""
        selector = selectors.DefaultSelector()
        for number in (self.control.fileno(), self.wake_read, self.watched):
            if number is not None:
                selector.register(number, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if self.watched in ready:
                return
            if self.wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
                self.reap()
            if self.control.fileno() in ready and not self.serve():
                return

    def reap(self, options: int = os.WNOHANG) -> None:
        """Report the children that have ended; with options 0, wait until none is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, options)
                if not pid:
                    return
                report = self.reports.pop(pid, None)
                if report is not None:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(report, str(os.waitstatus_to_exitcode(status)).encode())
                    os.close(report)

    def serve(self) -> bool:
        """Answer one request; say whether there was one."""
        data, descriptors, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, MAX_DESCRIPTORS)
        if not data:
            return False
        request = json.loads(data)
        given: list[int] = []
        try:
            if request["do"] == "start":
                answer, given = self.start(request, descriptors)
            elif request["do"] == "socket":
                made = socket.socket(request["family"], request["kind"])
                answer, given = {}, [made.detach()]
            elif request["do"] == "kill-all":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                self.reap(0)
                answer = {}
            else:
                simple = {
                    "hello": lambda _: {},
                    "set-up": set_up,
                    "hosts": write_hosts,
                    "signal": send_signal,
                }
                answer = simple[request["do"]](request)
        except OSError as error:
            answer = {"error": in_words(error)}
        finally:
            for number in descriptors:
                if number not in self.reports.values():
                    os.close(number)
        rights = array.array("i", given)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if given else []
        self.control.sendmsg([json.dumps(answer).encode()], ancillary)
        for number in given:
            os.close(number)
        return True

    def start(self, request: dict, descriptors: list[int]) -> tuple[dict, list[int]]:
        """Start a program: descriptors are its 0, 1, 2, the report pipe, and those to pass on."""
        standard, report, passed = descriptors[:3], descriptors[3], descriptors[4:]
        failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            become(request, standard + passed, failed_write)
        os.close(failed_write)
        failure = os.read(failed_read, 4096)
        os.close(failed_read)
        if failure:
            # It is about to leave: nobody shall see it on the host.
            os.waitpid(pid, 0)
            return {"error": json.loads(failure)}, []
        self.reports[pid] = report
        return {"pid": pid}, [os.pidfd_open(pid)]


def main() -> None:
    """Run the agent."""
    numbers = [int(word) for word in sys.argv[1:]]
    Agent(numbers[0], numbers[1] if len(numbers) > 1 else None).run()


if __name__ == "__main__":
    main()
