# SPDX-License-Identifier: Apache-2.0
"""Several real hosts on one machine, made from namespaces, with links that can fail.

    with Network(3) as network:
        process = network[0].start([sys.executable, "train.py"], stdout=log)
        network[1].cut()

Each host has its own network, processes (so that nothing can reach over to another host by pid),
host name, `/etc/hosts`, boot id, `/tmp`, `/var/tmp`, `/run`, `/dev/shm` and System V memory; the
rest of the file system is shared. All hosts hang on one bridge, which lies in a namespace too.

Nothing has a name outside: every namespace lives as long as its first process (`host_agent.py`),
and these die with the test process, however that ends. So nothing can be left, two test runs do
not see each other, and their hosts may have the same names and addresses.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
AGENT = (sys.executable, "-I", "-S", str(PROGRAMS / "host_agent.py"))
RELAY = (sys.executable, "-I", "-S", str(PROGRAMS / "link_relay.py"))
CHECKOUT = Path(__file__).resolve().parents[2]
HIDDEN = ("/tmp", "/var/tmp", "/run", "/dev/shm")
SUBNET = "10.77.0"
BRIDGE = "switch"
CLOCK_STEP_S = 100_000
ANSWER_WITHIN_S = 30.0
MAX_MESSAGE = 1 << 20
NOBODYS_MAC = "02:00:00:00:00:01"

File: TypeAlias = "int | Path | Any | None"


class HostsUnavailableError(RuntimeError):
    """This machine or this user cannot make hosts."""


def _unshare(*more: str) -> list[str]:
    """Return the command that runs what follows in new namespaces."""
    return ["unshare", *("--net", "--mount", "--pid", "--fork", "--kill-child"), *more, "--"]


def _as_root() -> tuple[str, ...]:
    """Return what a user who is not root needs to be root inside."""
    return () if os.geteuid() == 0 else ("--user", "--map-root-user")


@functools.cache
def why_not() -> str | None:
    """Say why hosts cannot be made here, or nothing when they can.

    It tries the kernel's part alone, so that a fault of this module is never taken for a reason.
    """
    for name in ("unshare", "ip", "tc", "bridge"):
        if shutil.which(name, path=_search_path()) is None:
            return f"no {name} here (util-linux and iproute2 are needed)"
    script = (
        "ip link add name nv0 type bridge && ip link add name nv1 type veth peer name nv2"
        " && ip link set dev nv1 master nv0"
        " && unshare --net --uts --ipc --mount --pid --fork --mount-proc mount -t tmpfs none /tmp"
    )
    tried = subprocess.run(
        [*_unshare("--mount-proc", *_as_root()), "sh", "-c", script],
        env=os.environ | {"PATH": _search_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
    return f"no network namespaces for this user: {said[-1]}"


def _search_path() -> str:
    """Return PATH with the folders of ip and tc, which a user's PATH may lack."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def _kept(more: Iterable[Path]) -> list[str]:
    """Return the entries of hidden folders that a host needs: interpreter, checkout, others."""
    needed = [sys.prefix, sys.base_prefix, sys.executable, str(CHECKOUT), *filter(None, sys.path)]
    needed += [os.path.realpath(path) for path in needed]
    needed += [os.path.abspath(path) for path in more]
    kept = set()
    for path, folder in itertools.product(needed, HIDDEN):
        if path.startswith(folder + "/"):
            kept.add("/".join([folder, path[len(folder) + 1 :].split("/")[0]]))
    return sorted(path for path in kept if os.path.exists(path))


class HostProcess:
    """A program on a host; like `subprocess.Popen`, as far as tests need it."""

    def __init__(self, args: Sequence[str], inner_pid: int, pidfd: int, report: int) -> None:
        """Own a pidfd and the pipe that will carry the exit code."""
        self.args = args
        self.inner_pid = inner_pid
        self.pid = _pid_of(pidfd)
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._report = report

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code, negative after a signal."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._report, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            # Nothing in the pipe: the whole host was lost.
            self.returncode = int(os.read(self._report, 16) or -signal.SIGKILL)
            os.close(self._report)
            os.close(self._pidfd)
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(OSError, AttributeError):
                os.close(self._report)
                os.close(self._pidfd)


def _child_of(pid: int) -> int:
    """Return the pid of a process's only child."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _pid_of(pidfd: int) -> int:
    """Return the pid of a pidfd as this process sees it."""
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pid:"))


class _NamespaceSet:
    """A set of namespaces with an agent as its first process, and the socket to it."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._agent: int | None = None
        self._lock = threading.Lock()

    def _connect(self, control: socket.socket, unshare_pid: int) -> None:
        """Own the socket and the pidfd of the agent once it has been started by `unshare`."""
        self._control = control
        control.settimeout(ANSWER_WITHIN_S)
        self.ask({"do": "hello"})
        self.agent_pid = _child_of(unshare_pid)
        self._agent = os.pidfd_open(self.agent_pid)

    def _end(self) -> None:
        """Kill the agent, and with it all that runs in here."""
        if self._agent is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._agent, signal.SIGKILL)
            os.close(self._agent)
            self._agent = None
        if self._control is not None:
            self._control.close()
            self._control = None

    def ask(
        self, request: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request and return the answer and the descriptors that came with it."""
        with self._lock:
            if self._control is None:
                raise HostsUnavailableError("the host is off")
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], list(descriptors))
                data, given, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 8)
            except (BrokenPipeError, ConnectionResetError):
                data, given = b"", []
        if not data:
            raise HostsUnavailableError("the host is gone")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise OSError(*answer["error"])
        return answer, given

    def start(  # noqa: PLR0913 - like Popen
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: File = None,
        stdout: File = None,
        stderr: File = None,
        pass_fds: Sequence[int] = (),
    ) -> HostProcess:
        """Start a program in a session of its own.

        stdin is nothing by default; stdout and stderr are this process's; each may be a
        descriptor, an open file, a path to append to, or `subprocess.DEVNULL`; stderr may be
        `subprocess.STDOUT`. Descriptors passed on are 3, 4, ... in the program.
        """
        words = [os.fspath(word) for word in argv]
        request = {
            "do": "start",
            "argv": words,
            "env": {**(os.environ if env is None else env)},
            "cwd": os.fspath(cwd or _working_folder()),
        }
        with contextlib.ExitStack() as stack:
            out = _descriptor(stdout, 1, stack)
            err = out if stderr == subprocess.STDOUT else _descriptor(stderr, 2, stack)
            into = _descriptor(subprocess.DEVNULL if stdin is None else stdin, 0, stack)
            report_read, report_write = os.pipe()
            stack.callback(os.close, report_write)
            try:
                answer, (pidfd,) = self.ask(request, [into, out, err, report_write, *pass_fds])
            except BaseException:
                os.close(report_read)
                raise
        return HostProcess(words, answer["pid"], pidfd, report_read)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        text: str = "",
        timeout: float = 60.0,
        check: bool = True,
        **more: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end and return what it printed."""
        with contextlib.ExitStack() as stack:
            into, out, err = (
                stack.enter_context(os.fdopen(os.memfd_create(name), "w+b"))
                for name in ("in", "out", "err")
            )
            into.write(text.encode())
            into.seek(0)
            process = self.start(argv, stdin=into, stdout=out, stderr=err, **more)
            try:
                code = process.wait(timeout)
            except BaseException:
                process.kill()
                raise
            shown = [os.pread(f.fileno(), 1 << 26, 0).decode(errors="replace") for f in (out, err)]
        done = subprocess.CompletedProcess(list(process.args), code, *shown)
        if check and code:
            raise AssertionError(f"{done.args} ended with {code}\n{shown[0]}{shown[1]}")
        return done

    def ip(self, *lines: str) -> None:
        """Run lines of `ip -batch` here."""
        env = {"PATH": _search_path()}
        self.run(["ip", "-batch", "-"], text="\n".join(lines) + "\n", env=env, cwd="/")

    def socket(
        self,
        family: int = socket.AF_INET,
        kind: int = socket.SOCK_STREAM,
    ) -> socket.socket:
        """Return a socket of this host's network, for use in this process."""
        _, (number,) = self.ask({"do": "socket", "family": int(family), "kind": int(kind)})
        return socket.socket(fileno=number)


def _working_folder() -> str:
    """Return the folder of this process where a host has it: its /tmp is its own."""
    folder = os.getcwd()
    return "/" if folder.startswith("/tmp/") else folder


def _descriptor(file: File, default: int, stack: contextlib.ExitStack) -> int:
    """Return the descriptor that a caller means."""
    if file is None:
        return default
    if file == subprocess.DEVNULL:
        number = os.open(os.devnull, os.O_RDWR)
    elif isinstance(file, (str, Path)):
        number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    elif isinstance(file, int):
        return file
    else:
        file.flush()
        return int(file.fileno())
    stack.callback(os.close, number)
    return number


class Host(_NamespaceSet):
    """One host: its name and address, programs on it, and its link to the others."""

    def __init__(self, network: Network, number: int, name: str) -> None:
        """Describe a host; `boot` makes it."""
        super().__init__()
        self.network = network
        self.name = name
        self.address = f"{SUBNET}.{number}"
        self.clock_offset_s = number * CLOCK_STEP_S if network.clocks_apart else 0
        self._cable = f"v{number}"
        self._number = number
        self._init: HostProcess | None = None
        self._relay: HostProcess | None = None
        self._relay_pipes: list[int] = []
        self._delay: tuple[float, float] = (0.0, 0.0)
        self._mbit: float | None = None
        self._apart: set[Host] = set()
        self._ignored = False

    def __repr__(self) -> str:
        """Show name and address."""
        return f"Host({self.name}, {self.address})"

    # --- life ----------------------------------------------------------------------------------

    def boot(self) -> None:
        """Bring the host up, with a new boot id; its link is whole."""
        lab = self.network.lab
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = ["--uts", "--ipc", "--mount-proc"]
        if self.clock_offset_s:
            offset = str(self.clock_offset_s)
            flags += ["--time", "--monotonic", offset, "--boottime", offset]
        with theirs:
            self._init = lab.start(
                [*_unshare(*flags), *AGENT, "3"],
                env={"PATH": _search_path()},
                cwd="/",
                stderr=self.network.complaints,
                pass_fds=[theirs.fileno()],
            )
        self._connect(ours, self._init.pid)
        boot_id = str(uuid.uuid4())
        self.ask(
            {
                "do": "set-up",
                "name": self.name,
                "hosts": self.network.table(),
                "boot_id": boot_id,
                "keep": self.network.kept,
                "shm_mb": self.network.shm_mb,
            }
        )
        # The parent of the first process is in the new network namespace as well.
        lab.ip(
            f"link add {self._cable} type veth peer name eth0 netns {self._init.inner_pid}",
            f"link set {self._cable} master {BRIDGE}",
            f"link set {self._cable} up",
        )
        self.ip("link set lo up", f"addr add {self.address}/24 brd + dev eth0", "link set eth0 up")

    @property
    def is_up(self) -> bool:
        """Whether the host runs."""
        return self._init is not None and self._init.poll() is None

    def power_off(self) -> None:
        """End the host at once: its peers hear nothing more, no FIN and no RST."""
        if self._init is None:
            return
        # The cable first, so that no FIN and no RST gets out when the processes end.
        self.network.lab.ip(f"link del {self._cable}")
        self._end()
        # The agent's parent sees the end of it only when all other processes are gone as well.
        self._init.wait(ANSWER_WITHIN_S)
        self._init = None
        self._stop_relay()
        self._delay, self._mbit = (0.0, 0.0), None
        self._apart.clear()
        self._ignored = False

    def _forget(self) -> None:
        """Close what belongs to a host that has ended with its network."""
        self._end()
        self._init = self._relay = None
        for number in self._relay_pipes:
            os.close(number)
        self._relay_pipes = []

    # --- processes -----------------------------------------------------------------------------

    def processes(self) -> set[int]:
        """Return all processes of this host, as pids of this process's own world."""
        return set(self._inner_pids())

    def _inner_pids(self) -> dict[int, int]:
        """Return the pids on the host of its processes, by the pids here."""
        if self._init is None:
            return {}
        namespace = os.readlink(f"/proc/{self.agent_pid}/ns/net")
        depth = len(_status(self.agent_pid)["NSpid"].split())
        found = {}
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == namespace:
                    fields = _status(int(entry))
                    numbers = fields["NSpid"].split()
                    # Fewer numbers: `unshare`, which made the host and waits for its end.
                    if len(numbers) >= depth and fields["State"].split()[0] not in "ZX":
                        found[int(entry)] = int(numbers[depth - 1])
        found.pop(self.agent_pid, None)
        return found

    def outer_pid(self, inner: int) -> int:
        """Return the pid here of a process that knows itself by another."""
        for pid, own in self._inner_pids().items():
            if own == inner:
                return pid
        raise ProcessLookupError(f"no process {inner} on {self.name}")

    def signal(self, inner: int, number: int) -> bool:
        """Send a signal to a process by the pid that it has on the host; say if it was there."""
        answer, _ = self.ask({"do": "signal", "pid": inner, "signal": int(number)})
        return bool(answer["sent"])

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the host at one moment; SIGSTOP freezes it."""
        self.signal(-1, number)

    def kill_all(self) -> None:
        """Kill every process of the host and wait until all are gone; the host itself stays up."""
        self.ask({"do": "kill-all"})

    def has(self, path: Path | str) -> Path:
        """Return where a file of the host, also one in its own /tmp, is found from here."""
        return Path(f"/proc/{self.agent_pid}/root{path}")

    def enter_command(self) -> str:
        """Return the shell command by which a person looks into the host."""
        return f"nsenter -t {self.agent_pid} -a"

    # --- names ---------------------------------------------------------------------------------

    def set_names(self, changes: Mapping[str, str] | None = None) -> None:
        """Change what this host takes names for (name -> address); no changes: as at boot."""
        self.ask({"do": "hosts", "hosts": self.network.table(changes)})

    # --- link ----------------------------------------------------------------------------------

    @property
    def _port(self) -> str:
        """The device by which the host hangs on the common bridge."""
        return f"t{self._number}far" if self._relay is not None else self._cable

    def cut(self, *, silently: bool = False) -> None:
        """Pull the host's cable; silently: the link stays up, but the switch drops everything."""
        if silently:
            self._set_port(0)
            self._ignored = True
        else:
            self.network.lab.ip(f"link set {self._cable} down")

    def mend(self) -> None:
        """Undo `cut` and `cut_from`."""
        self.network.lab.ip(f"link set {self._cable} up")
        if self._ignored:
            self._set_port(3)
            self._ignored = False
        for other in list(self._apart):
            for one, two in ((self, other), (other, self)):
                one._apart.discard(two)
                if one.is_up:
                    one.ip(f"neigh del {two.address} dev eth0")

    def _set_port(self, state: int) -> None:
        command = ["bridge", "link", "set", "dev", self._port, "state", str(state)]
        self.network.lab.run(command, env={"PATH": _search_path()}, cwd="/")

    def cut_from(self, other: Host) -> None:
        """Let nothing pass between this host and another one; both still reach the rest."""
        for one, two in ((self, other), (other, self)):
            one._apart.add(two)
            one.ip(f"neigh replace {two.address} lladdr {NOBODYS_MAC} dev eth0 nud permanent")

    def delay(self, ms: float, loss: float = 0.0, *, seed: int = 1) -> None:
        """Delay each frame to and from this host by so much, and lose this share of them.

        A round trip gets longer by twice the delay. 0 and 0 undo it.
        """
        self._delay = (ms / 1000, loss)
        if self.network.has_netem:
            self._queue()
        elif ms or loss:
            self._tell_relay(seed)
        else:
            self._stop_relay()

    def limit(self, mbit: float | None) -> None:
        """Let no more pass each way than so many million bits a second; None undoes it."""
        self._mbit = mbit
        self._queue()

    def _queue(self) -> None:
        """Set the queueing discipline of both ends of the cable."""
        seconds, loss = self._delay
        netem = self.network.has_netem and (seconds or loss)
        words: list[str] = []
        if netem:
            words = ["netem", "delay", f"{seconds * 1000}ms", "loss", f"{loss * 100}%"]
            words += ["limit", "100000"]
            words += ["rate", f"{self._mbit}mbit"] if self._mbit else []
        elif self._mbit:
            words = ["tbf", "rate", f"{self._mbit}mbit", "burst", "64kb", "latency", "200ms"]
        for side, device in ((self.network.lab, self._cable), (self, "eth0")):
            where = ["dev", device, "root"]
            env = {"PATH": _search_path()}
            if words:
                side.run(["tc", "qdisc", "replace", *where, *words], env=env, cwd="/")
            else:
                side.run(["tc", "qdisc", "del", *where], env=env, cwd="/", check=False)

    def _tell_relay(self, seed: int) -> None:
        """Give the relay its delay and loss; start it first where needed."""
        if self._relay is None:
            self._start_relay(seed)
        command, answer = self._relay_pipes
        os.write(command, "{} {}\n".format(*self._delay).encode())
        _expect(answer, b"ok\n")

    def _start_relay(self, seed: int) -> None:
        """Put the relay into the cable: host - second bridge - tap - relay - tap - switch."""
        lab = self.network.lab
        near, far = f"t{self._number}near", f"t{self._number}far"
        command_read, command = os.pipe()
        answer, answer_write = os.pipe()
        try:
            self._relay = lab.start(
                [*RELAY, near, far, str(seed)],
                env={"PATH": _search_path()},
                cwd="/",
                stdin=command_read,
                stdout=answer_write,
            )
        finally:
            os.close(command_read)
            os.close(answer_write)
        self._relay_pipes = [command, answer]
        _expect(answer, b"ready\n")
        own = f"b{self._number}"
        lab.ip(
            f"link add {own} type bridge",
            f"link set {near} master {own}",
            f"link set {far} master {BRIDGE}",
            *(f"link set {device} up" for device in (own, near, far)),
            f"link set {self._cable} master {own}",
        )

    def _stop_relay(self) -> None:
        """Take the relay out of the cable again."""
        if self._relay is None:
            return
        for number in self._relay_pipes:
            os.close(number)
        self._relay_pipes = []
        self._relay.wait(ANSWER_WITHIN_S)
        self._relay = None
        lines = [f"link del b{self._number}"]
        if self.is_up:
            lines.insert(0, f"link set {self._cable} master {BRIDGE}")
        self.network.lab.ip(*lines)


def _status(pid: int) -> dict[str, str]:
    """Return the fields of a process's status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return dict(line.split(":", 1) for line in text.splitlines())


def _expect(pipe: int, line: bytes) -> None:
    """Wait for a line from the relay."""
    ready, _, _ = select.select([pipe], [], [], ANSWER_WITHIN_S)
    if not ready or (said := os.read(pipe, 64)) != line:
        raise HostsUnavailableError(f"the relay said {said!r}, not {line!r}")


class Network:
    """Hosts on one bridge. A context manager; the hosts end with it."""

    def __init__(
        self,
        count: int = 2,
        *,
        names: Sequence[str] = (),
        keep: Sequence[Path] = (),
        shm_mb: int = 256,
        clocks_apart: bool = False,
    ) -> None:
        """Describe the hosts: node1, node2, ... or as named.

        Args:
            count: How many.
            names: Their names, instead of the usual ones.
            keep: Paths below /tmp, /var/tmp or /run that all hosts see, such as shared folders.
            shm_mb: Size of each host's /dev/shm.
            clocks_apart: Whether CLOCK_MONOTONIC of each host begins elsewhere, as on real ones
                (then `Host.clock_offset_s` says how far it is from this process's); without
                effect on kernels before 5.6.
        """
        self.names = list(names) or [f"node{number}" for number in range(1, count + 1)]
        self.kept = _kept(keep)
        self.shm_mb = shm_mb
        self.clocks_apart = clocks_apart and os.path.exists("/proc/self/ns/time")
        self.complaints = -1
        self.hosts: list[Host] = []
        self.lab = _NamespaceSet()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:  # noqa: PYI034 - Python 3.10 has no Self
        """Make the hosts."""
        try:
            self._open()
        except BaseException as error:
            if isinstance(error, HostsUnavailableError):
                error.args = (*error.args, os.pread(self.complaints, 4096, 0).decode())
            self.close()
            raise
        return self

    def _open(self) -> None:
        """Start the namespace of the bridge, then the hosts."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # By this pidfd the agent sees this process die even while a forked child of it lives on.
        myself = os.pidfd_open(os.getpid())
        command = [*_unshare("--mount-proc", *_as_root()), *AGENT]
        self.complaints = os.memfd_create("complaints")
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(myself)],
            env={"PATH": _search_path()},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stderr=self.complaints,
            pass_fds=[theirs.fileno(), myself],
            start_new_session=True,
        )
        os.close(myself)
        theirs.close()
        self.lab._connect(ours, self._process.pid)
        self.lab.ip(
            "link set lo up",
            f"link add {BRIDGE} type bridge forward_delay 0 mcast_snooping 0",
            f"link set {BRIDGE} up",
        )
        self.hosts = [Host(self, number, name) for number, name in enumerate(self.names, 1)]
        for host in self.hosts:
            host.boot()

    def __exit__(self, *_: object) -> None:
        """End the hosts."""
        self.close()

    def close(self) -> None:
        """End the hosts and all that runs on them, and wait until the kernel has let go of them."""
        if self._process is None:
            return
        self.lab._end()
        try:
            # It ends when the last process of the last host has ended.
            self._process.wait(ANSWER_WITHIN_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None
            os.close(self.complaints)
            for host in self.hosts:
                host._forget()

    def add(self, name: str = "") -> Host:
        """Make one more host; all hosts know its name from then on."""
        number = len(self.hosts) + 1
        host = Host(self, number, name or f"node{number}")
        self.hosts.append(host)
        host.boot()
        for other in self.hosts[:-1]:
            if other.is_up:
                other.set_names()
        return host

    def table(self, changes: Mapping[str, str] | None = None) -> str:
        """Return the text of /etc/hosts."""
        addresses = {host.name: host.address for host in self.hosts} | dict(changes or {})
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        lines += [f"{address} {name}" for name, address in addresses.items() if address]
        return "\n".join(lines) + "\n"

    @functools.cached_property
    def has_netem(self) -> bool:
        """Whether the kernel delays and loses packets by itself; else a relay does."""
        command = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        env = {"PATH": _search_path()}
        found = self.lab.run(command, env=env, cwd="/", check=False).returncode == 0
        if found:
            self.lab.run(["tc", "qdisc", "del", "dev", "lo", "root"], env=env, cwd="/")
        return found

    def __getitem__(self, number: int) -> Host:
        """Return a host by its place, from 0."""
        return self.hosts[number]

    def __iter__(self) -> Iterator[Host]:
        """Go through the hosts."""
        return iter(self.hosts)

    def __len__(self) -> int:
        """Return how many hosts there are."""
        return len(self.hosts)
