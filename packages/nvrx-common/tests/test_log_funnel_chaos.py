# SPDX-License-Identifier: Apache-2.0
"""The log funnel on a bad day: servers killed, stopped, out of disk; counted line by line."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs the extra grpc of nvrx-common")
pytest.importorskip("google.protobuf", reason="needs the extra grpc of nvrx-common")

import funnel_peers as peers
import ports
from funnel_peers import Resender, chunk, send, send_acked

pytestmark = pytest.mark.slow

LINE = b"%08d " + b"z" * 90 + b"\n"


def _feed(client: Resender, numbers: range, lines_per_s: float) -> None:
    """Hand lines over at a rate; a rate is the one thing that takes its time."""
    begin = time.monotonic()
    for count, number in enumerate(numbers):
        client.put(LINE % number)
        if count % 50 == 49:
            ahead = begin + (count + 1) / lines_per_s - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)


def _assert_all_once(path: Path, count: int) -> None:
    found = [int(line[:8]) for line in path.read_bytes().splitlines()]
    assert len(set(found)) == count, f"{count - len(set(found))} lines lost"
    assert len(found) == count, f"{len(found) - count} lines doubled"
    assert found == sorted(found)


@pytest.mark.parametrize("victim", ["root", "root behind a leaf", "leaf"])
@pytest.mark.no_second_try
def test_killed_server_loses_and_doubles_nothing(tmp_path: Path, victim: str) -> None:
    """At 2000 lines/s the server is killed twice and comes back: each line is there once."""
    count = 4000
    with ports.claimed(2) as port, peers.root(tmp_path, "--port", str(port)) as root:
        root.start()
        servers, address = {"root": root}, f"127.0.0.1:{port}"
        if victim != "root":
            leaf = peers.leaf(tmp_path, address, "--port", str(port + 1))
            servers["leaf"], address = leaf.start(), f"127.0.0.1:{port + 1}"
        target = servers[victim.split(maxsplit=1)[0]]
        try:
            client = Resender(address, tmp_path / "logs/x.log", "s")
            for begin in range(0, count, 1000):
                _feed(client, range(begin, begin + 1000), 2000)
                if begin in {1000, 2000}:
                    target.kill()
                    target.start(wait=False)
            assert client.close(50)
        finally:
            for server in servers.values():
                server.close()
    _assert_all_once(tmp_path / "logs/x.log", count)


@pytest.mark.no_second_try
def test_stopped_root_is_only_late(tmp_path: Path) -> None:
    """A root under SIGSTOP makes its senders wait; when it goes on, nothing is missing."""
    with peers.root(tmp_path) as root:
        root.start()
        client = Resender(root.address, tmp_path / "logs/x.log", "s")
        _feed(client, range(500), 5000)
        os.kill(root.pid, signal.SIGSTOP)
        _feed(client, range(500, 1500), 5000)
        os.kill(root.pid, signal.SIGCONT)
        assert client.close()
        assert root.stop() == 0
    _assert_all_once(tmp_path / "logs/x.log", 1500)


def _full_disk(tmp_path: Path) -> list[str]:
    """Return a command prefix that runs a program with a disk of 512 KiB at `logs/full`."""
    (tmp_path / "logs" / "full").mkdir(parents=True)
    mount = f"mount -t tmpfs -o size=512k tmpfs '{tmp_path}/logs/full'"
    flags = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    tried = subprocess.run(
        ["unshare", *flags, "sh", "-c", mount], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no mount in a namespace of our own: {tried.stderr.strip()}")
    return ["unshare", *flags, "sh", "-ec", f'{mount}; exec "$@"', "sh"]


@pytest.mark.no_second_try
def test_full_disk_recovers_without_a_restart(tmp_path: Path) -> None:
    """While a disk is full, logs elsewhere go on; then nothing is lost or doubled."""
    prefix = _full_disk(tmp_path)
    with peers.root(tmp_path, prefix=prefix) as root:
        root.start()
        # The server's view of the small disk.
        inside = Path(f"/proc/{root.pid}/root{tmp_path}/logs/full")
        (inside / "filler").write_bytes(b"f" * (300 << 10))
        client = Resender(root.address, tmp_path / "logs/full/x.log", "s", window=10_000)
        for number in range(4000):  # 400 KB
            client.put(LINE % number)
        peers.until(lambda: "No space left" in root.log.read_text(), "the full disk's line")
        good = [chunk(tmp_path / "logs/good.log", b"%d\n" % i, "1", "g", i) for i in range(1, 200)]
        assert send_acked(root.address, *good, timeout=60) == {"g": 199}
        assert client.committed < 4000
        (inside / "filler").unlink()
        assert client.close()
        shutil.copyfile(inside / "x.log", tmp_path / "x.log")
        assert root.stop() == 0
    _assert_all_once(tmp_path / "x.log", 4000)


@pytest.mark.no_second_try
def test_old_client_is_told_that_the_disk_is_full(tmp_path: Path) -> None:
    """A sender without acknowledgements never hears OK for bytes that are not in the file."""
    prefix = _full_disk(tmp_path)
    with peers.root(tmp_path, prefix=prefix) as root:
        root.start()
        Path(f"/proc/{root.pid}/root{tmp_path}/logs/full/filler").write_bytes(b"f" * (500 << 10))
        answer = send(root.address, chunk(tmp_path / "logs/full/x.log", b"x" * 65535 + b"\n"))
        assert answer.status == "ENOSPC"
        assert answer.bytes_received == 0
