# SPDX-License-Identifier: Apache-2.0
"""The private directory of a run: where it is, who may enter, how it goes."""

import contextlib
import json
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import procfs, rundir
from nvidia_resiliency_ext.shared_utils.children import start_child
from nvidia_resiliency_ext.shared_utils.errors import UnsafePathError
from nvidia_resiliency_ext.shared_utils.rundir import (
    MAX_SOCKET_PATH_BYTES,
    RunDir,
    remove_stale_run_dirs,
    stale_run_dirs,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def place() -> Iterator[Path]:
    """A short, private directory: that of a test may be too long for sockets."""
    path = Path("/tmp") / f"nvrxt-{os.urandom(4).hex()}"
    path.mkdir(mode=0o700)
    yield path
    for inner in sorted(path.rglob("*"), reverse=True):
        inner.rmdir() if inner.is_dir() and not inner.is_symlink() else inner.unlink()
    path.rmdir()


def change_owner(run_dir: RunDir, **fields: object) -> None:
    """Rewrite what the directory says about its owner."""
    path = Path(run_dir.path) / "owner.json"
    owner = json.loads(path.read_text())
    path.write_text(json.dumps({**owner, **fields}))


def test_directory_is_private_and_says_who_owns_it(place: Path) -> None:
    """A new directory lets nobody else in, whatever the umask, and names this very process."""
    old = os.umask(0)
    try:
        run_dir = RunDir.create("demo", {"TMPDIR": str(place)})
    finally:
        os.umask(old)
    path = Path(run_dir.path)
    assert path.parent == place
    assert path.name.startswith("nvrx-demo-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "owner.json").stat().st_mode) == 0o600
    owner = json.loads((path / "owner.json").read_text())
    own = procfs.read_stat(os.getpid())
    assert own is not None
    assert owner["pid"] == os.getpid()
    assert owner["start_ticks"] == own.start_ticks
    assert (owner["boot_id"], owner["uid"]) == (procfs.boot_id(), os.geteuid())
    assert owner["label"] == "demo"
    run_dir.remove()
    assert not path.exists()


def test_names_cannot_be_guessed(place: Path) -> None:
    """Two directories of one label have different random names."""
    names = {RunDir.create("x", {"TMPDIR": str(place)}).path for _ in range(5)}
    assert len(names) == 5


def test_socket_in_it_can_be_bound(place: Path) -> None:
    """A socket with the longest promised name can be bound, and goes with the directory."""
    with (
        RunDir.create("x" * 24, {"TMPDIR": str(place)}) as run_dir,
        socket.socket(socket.AF_UNIX) as server,
    ):
        path = run_dir.socket_path("s" * 40)
        assert len(path) <= MAX_SOCKET_PATH_BYTES
        server.bind(path)
    assert not os.path.exists(run_dir.path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0", "owner.json", "s" * 108])
def test_bad_socket_name_is_refused(place: Path, name: str) -> None:
    """A name that leaves the directory or does not fit is refused before anything is bound."""
    run_dir = RunDir.create("x", {"TMPDIR": str(place)})
    with pytest.raises(ValueError, match=r"no name|too long"):
        run_dir.socket_path(name)


@pytest.mark.parametrize("label", ["", "x" * 25, "a/b", "a b", "\u00e9", "."])
def test_bad_label_is_refused(place: Path, label: str) -> None:
    """A label that is no plain part of a file name is refused."""
    if label == ".":
        RunDir.create(label, {"TMPDIR": str(place)}).remove()
        return
    with pytest.raises(ValueError, match="label"):
        RunDir.create(label, {"TMPDIR": str(place)})


@pytest.mark.parametrize("length", [30, 60, 200])
def test_long_place_is_passed_over(place: Path, length: int) -> None:
    """Where sockets would not fit, or only short names, the directory is made in /tmp instead."""
    long_place = place / ("x" * length)
    long_place.mkdir(mode=0o700)
    with RunDir.create("demo", {"TMPDIR": str(long_place)}) as run_dir:
        assert os.path.dirname(run_dir.path) == "/tmp"
        assert len(run_dir.socket_path("s" * 40)) <= MAX_SOCKET_PATH_BYTES


def test_runtime_directory_comes_first(place: Path) -> None:
    """XDG_RUNTIME_DIR is preferred, then TMPDIR, then /tmp."""
    for name in ("xdg", "tmp"):
        (place / name).mkdir(mode=0o700)
    environ = {"XDG_RUNTIME_DIR": str(place / "xdg"), "TMPDIR": str(place / "tmp")}
    assert Path(RunDir.create("x", environ).path).parent == place / "xdg"
    environ["XDG_RUNTIME_DIR"] = str(place / "missing")
    assert Path(RunDir.create("x", environ).path).parent == place / "tmp"
    environ["TMPDIR"] = "relative"
    with RunDir.create("x", environ) as run_dir:
        assert os.path.dirname(run_dir.path) == "/tmp"


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_place_where_others_could_swap_it_is_passed_over(place: Path, mode: int) -> None:
    """A directory that others may write to is used only with the sticky bit."""
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(mode)
    with RunDir.create("x", {"TMPDIR": str(shared)}) as run_dir:
        assert os.path.dirname(run_dir.path) == "/tmp"
    shared.chmod(mode | stat.S_ISVTX)
    assert Path(RunDir.create("x", {"TMPDIR": str(shared)}).path).parent == shared


def test_removal_follows_no_link_and_may_be_repeated(place: Path) -> None:
    """All inside goes, what links point to stays, and a second removal is harmless."""
    run_dir = RunDir.create("x", {"TMPDIR": str(place)})
    (place / "kept").mkdir()
    (place / "kept" / "file").write_text("x")
    inner = Path(run_dir.path) / "sub" / "deep"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (inner / "link").symlink_to(place / "kept")
    run_dir.remove()
    run_dir.remove()
    assert sorted(os.listdir(place)) == ["kept"]
    assert os.listdir(place / "kept") == ["file"]


def test_another_directory_under_its_name_is_left_alone(place: Path) -> None:
    """If the name was taken over by something else, that is not removed."""
    run_dir = RunDir.create("x", {"TMPDIR": str(place)})
    os.rename(run_dir.path, place / "moved")
    Path(run_dir.path).mkdir()
    (Path(run_dir.path) / "foreign").write_text("x")
    run_dir.remove()
    assert (Path(run_dir.path) / "foreign").exists()


def test_another_process_can_take_it_over(place: Path) -> None:
    """A monitor can open the launcher's directory by path, and remove it."""
    path = RunDir.create("x", {"TMPDIR": str(place)}).path
    RunDir(path).remove()
    assert not os.path.exists(path)
    with pytest.raises(FileNotFoundError):
        RunDir(path)


def test_open_or_foreign_directory_is_not_taken_over(place: Path) -> None:
    """A directory that others may enter, or a link to one, is refused."""
    run_dir = RunDir.create("x", {"TMPDIR": str(place)})
    (place / "link").symlink_to(run_dir.path)
    with pytest.raises(UnsafePathError):
        RunDir(str(place / "link"))
    os.chmod(run_dir.path, 0o750)
    with pytest.raises(UnsafePathError):
        RunDir(run_dir.path)


def test_directory_of_a_dead_owner_is_removed(place: Path) -> None:
    """A run whose process has ended, or whose number now names another process, is cleaned up."""
    environ = {"TMPDIR": str(place)}
    live = RunDir.create("live", environ)
    dead = RunDir.create("dead", environ)
    recycled = RunDir.create("recycled", environ)
    rebooted = RunDir.create("rebooted", environ)
    with start_child(["true"]) as child:
        child.wait(30.0)
    change_owner(dead, pid=child.pid)
    change_owner(recycled, start_ticks=1)
    change_owner(rebooted, boot_id="another-boot")
    expected = sorted([dead.path, recycled.path, rebooted.path])
    found = [path for path in stale_run_dirs(environ) if path.startswith(str(place))]
    assert found == expected
    removed = [path for path in remove_stale_run_dirs(environ) if path.startswith(str(place))]
    assert removed == expected
    assert os.listdir(place) == [os.path.basename(live.path)]


def test_a_place_that_cannot_be_listed_is_passed_over(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary directory that goes while it is looked at hides no stale directory elsewhere."""
    stale = RunDir.create("rebooted", {"TMPDIR": str(place)})
    change_owner(stale, boot_id="another-boot")
    gone = str(place / "gone")
    monkeypatch.setattr(rundir, "trusted_parents", lambda _: [gone, str(place)])
    assert stale_run_dirs({}) == [stale.path]


def test_zombie_owner_is_dead(place: Path) -> None:
    """An owner that ended and was not reaped yet cannot use its directory any more."""
    environ = {"TMPDIR": str(place)}
    run_dir = RunDir.create("x", environ)
    with start_child(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        zombie = procfs.read_stat(child.pid)
        assert zombie is not None
        change_owner(run_dir, pid=child.pid, start_ticks=zombie.start_ticks)
        assert run_dir.path in stale_run_dirs(environ)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"[]",
        b"{}",
        b'{"boot_id": ""}',
        b"\xff",
        b"{" * 5000,
        b'{"boot_id": "x", "pid": 1}',
    ],
)
def test_owner_that_cannot_be_evaluated_counts_as_alive(place: Path, content: bytes) -> None:
    """A directory whose owner file says nothing reliable is kept."""
    environ = {"TMPDIR": str(place)}
    run_dir = RunDir.create("x", environ)
    (Path(run_dir.path) / "owner.json").write_bytes(content)
    assert run_dir.path not in stale_run_dirs(environ)


@pytest.mark.parametrize(
    "fields",
    [
        {"pid_namespace": "pid:[1]", "pid": 2**22 + 1},
        {"host": "elsewhere", "boot_id": "another-boot"},
        {"pid": "1"},
        {"pid": None},
    ],
)
def test_owner_elsewhere_counts_as_alive(place: Path, fields: dict[str, object]) -> None:
    """An owner in another container, or on another host that shares the place, is not evaluated."""
    environ = {"TMPDIR": str(place)}
    run_dir = RunDir.create("x", environ)
    change_owner(run_dir, **fields)
    assert run_dir.path not in stale_run_dirs(environ)


@as_root
def test_directory_of_another_user_is_left_alone(place: Path) -> None:
    """What belongs to somebody else is not ours to remove, even if its owner is dead."""
    environ = {"TMPDIR": str(place)}
    run_dir = RunDir.create("x", environ)
    change_owner(run_dir, boot_id="another-boot")
    assert run_dir.path in stale_run_dirs(environ)
    os.chown(run_dir.path, 65534, -1)
    assert run_dir.path not in stale_run_dirs(environ)


def test_links_and_files_with_such_names_are_left_alone(place: Path) -> None:
    """What only looks like a run directory by its name is neither read nor removed."""
    environ = {"TMPDIR": str(place)}
    run_dir = RunDir.create("x", environ)
    change_owner(run_dir, boot_id="another-boot")
    (place / "nvrx-link-1").symlink_to(run_dir.path)
    (place / "nvrx-file-1").write_text("x")
    os.mkfifo(place / "nvrx-fifo-1")
    mine = [path for path in stale_run_dirs(environ) if path.startswith(str(place))]
    assert mine == [run_dir.path]


def test_failed_start_leaves_nothing(place: Path) -> None:
    """If the owner file cannot be written no directory is left in any place."""
    program = (
        "import os, resource, signal, sys\n"
        "from nvidia_resiliency_ext.shared_utils.rundir import RunDir\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try:\n"
        "    RunDir.create(sys.argv[1], {'TMPDIR': sys.argv[2]})\n"
        "except OSError as error:\n"
        "    print(error.__cause__.strerror)\n"
    )
    label = f"full{os.getpid()}"
    arguments = [sys.executable, "-B", "-c", program, label, str(place)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=150)
    assert result.stdout == "File too large\n"
    for where in (place, Path("/tmp"), Path("/dev/shm")):
        assert list(where.glob(f"nvrx-{label}-*")) == []


def test_nothing_is_left_where_it_could_not_be_made(place: Path) -> None:
    """Without free descriptors no directory is made, and none stays behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0) + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        with pytest.raises(OSError, match="the last one tried: Too many open files"):
            RunDir.create("demo", {"TMPDIR": str(place)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
    assert list(place.iterdir()) == []
