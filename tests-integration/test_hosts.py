# SPDX-License-Identifier: Apache-2.0
"""The hosts made of namespaces, on which scenarios of many nodes run, are like real ones."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import leftovers
import pytest
from fault_jobs import is_running, wait_until
from hosts import Network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hosts import Host

pytestmark = pytest.mark.netns

PORT = 7000
STALLED_S = 0.5
LIMIT_S = 60.0


@pytest.fixture
def network() -> Iterator[Network]:
    """Give three hosts."""
    with Network(3) as made:
        yield made


@contextlib.contextmanager
def stream(one: Host, two: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give both ends of a TCP connection between two hosts."""
    with two.socket() as listener, one.socket() as client:
        listener.bind((two.address, 0))
        listener.listen()
        for end in (listener, client):
            end.settimeout(LIMIT_S)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            for end in (client, server):
                end.settimeout(LIMIT_S)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield client, server


def round_trip(client: socket.socket, server: socket.socket) -> float:
    """Send a byte there and back and return the seconds that it took."""
    began = time.monotonic()
    client.send(b"a")
    server.send(server.recv(1))
    assert client.recv(1) == b"a"
    return time.monotonic() - began


def best_round_trip(one: Host, two: Host, times: int = 20) -> float:
    """Return the shortest of several round trips."""
    with stream(one, two) as ends:
        return min(round_trip(*ends) for _ in range(times))


def wait_for_round_trip(one: Host, two: Host, limit_s: float) -> float:
    """Wait until a round trip takes less than so long, as a busy machine's may not; return it."""

    def quick() -> float:
        found = best_round_trip(one, two, 5)
        return found if found < limit_s else 0.0

    return float(wait_until(quick, f"a round trip within {limit_s:.3f} s", LIMIT_S))


def is_stalled(client: socket.socket, server: socket.socket) -> bool:
    """Say whether what is sent does not arrive, and nobody hears of an error."""
    client.send(b"b")
    server.settimeout(STALLED_S)
    try:
        server.recv(1)
    except TimeoutError:
        server.settimeout(LIMIT_S)
        return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    return False


def outside() -> list[str]:
    """Return the network devices and named namespaces that everybody sees."""
    command = "ip -o link | cut -d: -f2; ip netns list"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()


# --- hosts ---------------------------------------------------------------------------------------


def test_every_host_is_one_of_its_own(network: Network) -> None:
    """Each host has its name, address, boot id, processes, /tmp and /dev/shm; files are shared."""
    script = "hostname; cat /proc/sys/kernel/random/boot_id; touch /tmp/x /dev/shm/x; ls /dev/shm"
    shown = [host.run(["sh", "-c", script]).stdout.split() for host in network]
    assert [words[0] for words in shown] == ["node1", "node2", "node3"]
    here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len({words[1] for words in shown} | {here}) == 4
    assert all(words[2:] == ["x"] for words in shown)
    assert not Path("/dev/shm/x").exists()
    assert network[0].has("/tmp/x").exists()
    own = network[0].run([sys.executable, "-c", "import os; print(os.listdir('/proc'))"])
    assert str(os.getpid()) not in own.stdout
    assert network[1].run(["cat", __file__]).stdout == Path(__file__).read_text()


def test_names_resolve_on_every_host(network: Network) -> None:
    """All hosts know all names; one host can be told another truth, or none."""
    code = "import socket; print(socket.gethostbyname('node3'))"
    for host in network:
        assert host.run([sys.executable, "-c", code]).stdout.strip() == network[2].address
    network[0].set_names({"node3": "10.77.0.99"})
    assert "10.77.0.99" in network[0].run([sys.executable, "-c", code]).stdout
    network[0].set_names({"node3": ""})
    assert "gaierror" in network[0].run([sys.executable, "-c", code], check=False).stderr


def test_a_program_on_a_host(network: Network, tmp_path: Path) -> None:
    """A program gets arguments, environment and folder; its output and exit code come back."""
    log = tmp_path / "log"
    process = network[0].start(
        ["sh", "-c", 'echo "$0 $X"; pwd; echo err >&2; exit 3', "a b"],
        env={"X": "y", "PATH": os.environ["PATH"]},
        cwd="/usr",
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    assert process.wait(LIMIT_S) == 3
    assert log.read_text() == "a b y\n/usr\nerr\n"
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        network[0].start(["/no-such-program"])
    waiting = network[0].start(["sleep", "1000"])
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    assert network[0].processes() == {waiting.pid}
    assert network[0].outer_pid(waiting.inner_pid) == waiting.pid
    assert network[0].signal(waiting.inner_pid, signal.SIGTERM)
    assert waiting.wait(LIMIT_S) == -signal.SIGTERM
    assert not network[0].signal(waiting.inner_pid, signal.SIGTERM)


def test_processes_that_escape_are_the_hosts_still(network: Network) -> None:
    """A daemon in a session of its own is seen, and ends with all that runs on the host."""
    code = "setsid sh -c 'trap : TERM INT HUP; while true; do sleep 1000; done' & echo $!"
    network[0].run(["sh", "-c", code])
    wait_until(lambda: len(network[0].processes()) == 2, "shell and sleep")
    other = network[1].start(["sleep", "1000"])
    left = network[0].processes()
    network[0].kill_all()
    assert network[0].processes() == set()
    assert not any(is_running(pid) for pid in left)
    assert other.poll() is None
    assert network[0].run(["echo", "up"]).stdout == "up\n"


def test_the_clocks_of_hosts_may_be_apart() -> None:
    """With clocks apart, each host's monotonic clock is off by what the host says."""
    code = [sys.executable, "-c", "import time; print(time.monotonic())"]
    with Network(2, clocks_apart=True) as network:
        if not network.clocks_apart:
            pytest.skip("the kernel has no time namespaces")
        for host in network:
            there = float(host.run(code).stdout)
            assert abs(there - host.clock_offset_s - time.monotonic()) < LIMIT_S
        assert network[0].clock_offset_s != network[1].clock_offset_s


def test_a_host_comes_late_and_another_comes_back(network: Network) -> None:
    """A new host and one that was off are reached by name; the latter has booted anew."""
    boot_id = ["cat", "/proc/sys/kernel/random/boot_id"]
    before = network[1].run(boot_id).stdout
    late = network.add()
    assert best_round_trip(network[0], late) < 1
    assert late.address in network[0].run(["getent", "hosts", "node4"]).stdout
    process = network[1].start(["sleep", "1000"])
    network[1].power_off()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert not network[1].is_up
    network[1].boot()
    assert network[1].run(boot_id).stdout != before
    assert best_round_trip(network[1], late) < 1


# --- links ---------------------------------------------------------------------------------------


def test_a_cut_stalls_a_stream_and_mending_resumes_it(network: Network) -> None:
    """While a host is cut off its streams stall without an error; then what was sent arrives."""
    for silently in (False, True):
        with stream(network[0], network[1]) as (client, server):
            round_trip(client, server)
            network[1].cut(silently=silently)
            assert is_stalled(client, server)
            network[1].mend()
            assert server.recv(1) == b"b"
            round_trip(client, server)


def test_a_cut_between_two_hosts_leaves_the_third(network: Network) -> None:
    """Two hosts that are cut from each other both still reach a third."""
    with stream(network[0], network[1]) as (client, server):
        network[0].cut_from(network[1])
        assert is_stalled(client, server)
        assert best_round_trip(network[0], network[2]) < 1
        assert best_round_trip(network[1], network[2]) < 1
        network[1].mend()
        assert server.recv(1) == b"b"


def test_a_host_that_loses_power_says_nothing(network: Network) -> None:
    """The peer of a host that was switched off gets no end of the stream; of a killed one it does.

    This is what tells a lost host from a lost process.
    """
    code = (
        "import socket, sys\n"
        f"listener = socket.create_server(('', {PORT}))\n"
        "print('ready', flush=True)\n"
        "peer, _ = listener.accept()\n"
        "print('accepted', flush=True)\n"
        "peer.recv(1)\n"
    )
    for deed, heard in ((network[1].kill_all, True), (network[2].power_off, False)):
        host = deed.__self__
        read, write = os.pipe()
        host.start([sys.executable, "-c", code], stdout=write)
        os.close(write)
        with os.fdopen(read) as said, network[0].socket() as client:
            assert said.readline() == "ready\n"
            client.settimeout(LIMIT_S)
            client.connect((host.address, PORT))
            assert said.readline() == "accepted\n"
            deed()
            client.settimeout(LIMIT_S if heard else STALLED_S)
            if heard:
                assert client.recv(1) == b""
            else:
                with pytest.raises(TimeoutError):
                    client.recv(1)


def test_a_delay_is_felt_both_ways_and_undone(network: Network) -> None:
    """A delay of 30 ms makes each round trip 60 ms longer; when undone nothing of it stays."""
    before = best_round_trip(network[0], network[1])
    with stream(network[0], network[1]) as kept:
        network[1].delay(30)
        round_trip(*kept)  # an open connection survives the change
        for one, two in ((network[0], network[1]), (network[1], network[0])):
            assert wait_for_round_trip(one, two, 0.060 + before + 0.1) >= 0.060
        wait_for_round_trip(network[0], network[2], 0.060)
        network[1].delay(0)
        round_trip(*kept)
        wait_for_round_trip(network[0], network[1], 0.060)


def test_losses_are_as_many_as_wished(network: Network) -> None:
    """With a loss of 30 % about that share of datagrams is lost, and TCP still gets through."""
    network[0].delay(1, loss=0.3)
    # Nobody may ask for an address in vain: that would lose more than the link does.
    for one, two in ((0, 1), (1, 0)):
        mac = network[two].run(["cat", "/sys/class/net/eth0/address"]).stdout.strip()
        address = network[two].address
        network[one].ip(f"neigh replace {address} lladdr {mac} dev eth0 nud permanent")
    with (
        network[0].socket(kind=socket.SOCK_DGRAM) as sender,
        network[1].socket(kind=socket.SOCK_DGRAM) as receiver,
    ):
        receiver.bind((network[1].address, PORT))
        receiver.settimeout(0.05)
        sender.connect((network[1].address, PORT))
        got = 0
        for number in range(20):
            for _ in range(50):
                sender.send(b"x")
            end = str(number).encode()
            while True:  # until one of the ends has got through
                sender.send(end)
                with contextlib.suppress(TimeoutError):
                    while (said := receiver.recv(8)) != end:
                        got += said == b"x"
                    break
    assert 600 <= got <= 800, got
    with stream(network[0], network[1]) as ends:
        round_trip(*ends)


def test_a_limited_link_is_slow(network: Network) -> None:
    """At 10 million bits a second, a megabyte takes most of a second; without limit it does not."""

    def seconds() -> float:
        with stream(network[0], network[1]) as (client, server):
            began = time.monotonic()
            data, got = memoryview(bytes(10**6)), 0
            client.setblocking(False)
            while got < 10**6:
                with contextlib.suppress(BlockingIOError):
                    data = data[client.send(data) :] if data else data
                with contextlib.suppress(BlockingIOError):
                    got += len(server.recv(65536, socket.MSG_DONTWAIT))
            return time.monotonic() - began

    network[0].limit(10)
    assert seconds() > 0.5
    network[0].limit(None)
    wait_until(lambda: seconds() < 0.5, "a megabyte in less than half a second", LIMIT_S)


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.no_second_try
def test_nothing_is_left_outside() -> None:
    """While hosts are up nothing of them has a name outside; afterwards no process is left."""
    before, descriptors = outside(), leftovers.descriptors()
    with Network(2) as network:
        network[0].delay(1)
        processes = [host.start(["sleep", "1000"]) for host in network]
        agents = [host.agent_pid for host in network] + [network.lab.agent_pid]
        assert outside() == before
    assert [process.wait(LIMIT_S) for process in processes] == [-signal.SIGKILL] * 2
    assert not any(is_running(pid) for pid in agents)
    assert outside() == before
    # What an earlier test has left may be closed meanwhile.
    assert not leftovers.descriptors().keys() - descriptors.keys()


@pytest.mark.no_second_try
def test_hosts_die_with_the_test_that_made_them() -> None:
    """When the test process is killed its hosts end, also while a forked child of it lives on."""
    code = (
        "import os, subprocess, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent / 'helpers')!r})\n"
        "from hosts import Network\n"
        "network = Network(2).__enter__()\n"
        "network[0].start(['sleep', '1000'], stdout=subprocess.DEVNULL)\n"
        "network[0].delay(1)\n"
        "forked = os.fork()\n"
        "if forked:\n"
        "    print(forked, flush=True)\n"
        "time.sleep(1000)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert maker.stdout is not None
    forked = int(maker.stdout.readline())
    try:
        ours = {*_tree(maker.pid)} - {forked}
        # Of the bridge and of each host, `unshare` and the agent; and what runs on one of them.
        assert len(ours) >= 7
        maker.kill()
        maker.wait()
        wait_until(lambda: not any(is_running(pid) for pid in ours), "hosts ended")
        assert is_running(forked)
    finally:
        maker.kill()
        maker.wait()
        os.kill(forked, signal.SIGKILL)
        maker.stdout.close()


def _tree(pid: int) -> Iterator[int]:
    """Go through all descendants of a process."""
    for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(word)
        yield from _tree(int(word))


def test_two_networks_do_not_see_each_other(network: Network) -> None:
    """Hosts of two tests at once may have the same names and addresses."""
    with Network(2) as other, network[1].socket() as listener:
        listener.bind((network[1].address, PORT))
        listener.listen()
        with other[0].socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect((other[1].address, PORT))
        assert best_round_trip(other[0], other[1]) < 1
        assert other[0].address == network[0].address


def test_a_user_who_is_not_root_can_make_hosts_too() -> None:
    """Where the kernel lets users make namespaces, hosts need no root."""
    if os.geteuid():
        pytest.skip("all the others have shown it")
    helpers = Path(__file__).parent / "helpers"
    code = (
        f"import sys; sys.path.insert(0, {str(helpers)!r})\n"
        "from hosts import Network, why_not\n"
        "if why_not(): sys.exit(f'SKIP {why_not()}')\n"
        "with Network(2) as network:\n"
        "    network[0].cut(); network[0].mend()\n"
        "    print(network[1].run(['hostname']).stdout)\n"
    )
    become = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "sh", "-c"]
    for python in (sys.executable, "/usr/bin/python3"):
        can_read = f'{python} -V && test -r "{helpers}/hosts.py"'
        if subprocess.run([*become, can_read], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("nobody can neither run this interpreter nor read this checkout")
    command = [*become, 'exec "$0" -c "$1"', python, code]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", timeout=LIMIT_S
    )
    if "SKIP" in shown.stderr:
        pytest.skip(shown.stderr.strip())
    assert shown.stdout.split() == ["node2"], shown.stderr
