# SPDX-License-Identifier: Apache-2.0
"""Paths that may be hostile, and files that are written whole."""

import errno
import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import os_utils
from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError, UnsafePathError

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """A descriptor of an empty directory `root` in the test's own directory."""
    (tmp_path / "root").mkdir()
    descriptor = os.open(tmp_path / "root", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def make_directory(path: Path, mode: int) -> Path:
    """Make a directory with exactly these permissions."""
    path.mkdir()
    path.chmod(mode)
    return path


def test_good_and_missing_directories_pass(tmp_path: Path) -> None:
    """A directory that is missing, private or sticky can be used."""
    os_utils.validate_directory(str(tmp_path))
    os_utils.validate_directory(str(tmp_path / "missing" / "deeper"))
    os_utils.validate_directory(str(make_directory(tmp_path / "sticky", 0o1777)))
    os_utils.validate_directory(str(make_directory(tmp_path / "group", 0o770)))
    os_utils.validate_directory("/tmp")


def bad_file(base: Path) -> Path:
    """A file where a directory should be."""
    (base / "file").write_text("")
    return base / "file"


def bad_link(base: Path) -> Path:
    """A link to a directory that is good itself."""
    (base / "good").mkdir()
    (base / "link").symlink_to(base / "good")
    return base / "link"


def bad_dangling(base: Path) -> Path:
    """A link to nothing, which would be created by whoever follows it."""
    (base / "link").symlink_to(base / "nothing")
    return base / "link"


def bad_parent(base: Path) -> Path:
    """A good directory reached through a link."""
    (base / "real" / "deep").mkdir(parents=True)
    (base / "parent").symlink_to(base / "real")
    return base / "parent" / "deep"


def bad_loop(base: Path) -> Path:
    """A link to itself."""
    (base / "loop").symlink_to(base / "loop")
    return base / "loop" / "x"


def bad_world(base: Path) -> Path:
    """A directory in which everybody may replace files."""
    return make_directory(base / "world", 0o777)


BAD_DIRECTORIES = [bad_file, bad_link, bad_dangling, bad_parent, bad_loop, bad_world]


@pytest.mark.parametrize("make", BAD_DIRECTORIES)
def test_bad_directory_is_refused(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """What is no directory, leads through a link, or is open to everybody raises an OSError."""
    path = make(tmp_path)
    with pytest.raises(UnsafePathError) as caught:
        os_utils.validate_directory(str(path))
    assert isinstance(caught.value, OSError)
    assert caught.value.filename == str(path)
    assert caught.value.errno


@as_root
def test_group_writable_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Our own group-writable directory is our choice; somebody else's is not."""
    path = make_directory(tmp_path / "group", 0o770)
    os_utils.validate_directory(str(path))
    os.chown(path, NOBODY, -1)
    with pytest.raises(UnsafePathError, match="uid 65534"):
        os_utils.validate_directory(str(path))


@as_root
def test_unreadable_directory_is_refused(tmp_path: Path) -> None:
    """A directory that we may not read is refused, before anybody relies on it."""
    program = (
        "import os, sys\n"
        "from nvidia_resiliency_ext.shared_utils.os_utils import validate_directory\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    validate_directory(sys.argv[1])\n"
        "except OSError as error:\n"
        "    print(error.errno)\n"
    )
    base = Path("/tmp") / f"nvrx-test-{os.getpid()}-unreadable"
    base.mkdir(mode=0o700)
    try:
        arguments = [sys.executable, "-c", program, str(base)]
        result = subprocess.run(
            arguments, capture_output=True, text=True, check=True, timeout=150, cwd="/"
        )
    finally:
        base.rmdir()
    assert result.stdout.strip() == str(errno.EACCES)


def test_good_and_missing_files_pass(tmp_path: Path) -> None:
    """A regular file in a good directory, or none at all, can be used."""
    (tmp_path / "file").write_text("x")
    os_utils.validate_filepath(str(tmp_path / "file"))
    os_utils.validate_filepath(str(tmp_path / "missing"))
    os_utils.validate_filepath(str(tmp_path / "missing" / "file"))


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "dangling", "parent", "world"])
def test_bad_file_is_refused(tmp_path: Path, kind: str) -> None:
    """What is no regular file, leads through a link or lies in an open directory is refused."""
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "target").write_text("x")
        path.symlink_to(tmp_path / "target")
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nothing")
    elif kind == "parent":
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "file").write_text("x")
        (tmp_path / "alias").symlink_to("real")
        path = tmp_path / "alias" / "file"
    else:
        path = make_directory(tmp_path / "world", 0o777) / "file"
        path.write_text("x")
    with pytest.raises(OSError, match=r"link|regular|everybody"):
        os_utils.validate_filepath(str(path))


def test_paths_under_roots_are_resolved(tmp_path: Path) -> None:
    """A path is answered with its real path when that lies under a root, also an aliased root."""
    inside = tmp_path / "data" / "run"
    inside.mkdir(parents=True)
    (tmp_path / "alias").symlink_to("data")
    (inside / "within").symlink_to(inside)
    roots = [str(tmp_path / "other"), str(tmp_path / "alias")]
    for path in (inside, tmp_path / "alias" / "run", inside / "within", inside / ".." / "run"):
        assert os_utils.resolve_under_allowed_roots(str(path), roots) == str(inside)
    assert os_utils.resolve_under_allowed_roots(str(inside / "new"), roots) == str(inside / "new")
    assert os_utils.resolve_under_allowed_roots("/etc", ["/"]) == "/etc"


@pytest.mark.parametrize("path", ["data/../..", "data-twin/x", "data/out/x", "/etc/passwd", "a\0b"])
def test_paths_outside_roots_are_refused(tmp_path: Path, path: str) -> None:
    """Neither dots, nor a shared prefix, nor a link leads out of the roots."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "out").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"outside|null") as caught:
        os_utils.resolve_under_allowed_roots(str(tmp_path / path), [str(tmp_path / "data")])
    assert isinstance(caught.value, PathOutsideRootsError)


def test_no_roots_allow_nothing() -> None:
    """Without a root every path is outside."""
    with pytest.raises(PathOutsideRootsError):
        os_utils.resolve_under_allowed_roots("/tmp", [])


def test_append_creates_and_appends_beneath(root: int, tmp_path: Path) -> None:
    """A file below the root is created with the asked mode and appended to later."""
    (tmp_path / "root" / "a").mkdir()
    old = os.umask(0)
    try:
        for text in (b"one ", b"two"):
            descriptor = os_utils.open_append_beneath(root, "./a//log.txt", 0o640)
            os.write(descriptor, text)
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
    finally:
        os.umask(old)
    path = tmp_path / "root" / "a" / "log.txt"
    assert path.read_bytes() == b"one two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "path", ["", ".", "/etc/x", "../x", "a/../../x", "a/..", "a/", "..", "//x"]
)
def test_append_refuses_paths_that_lead_outside(root: int, tmp_path: Path, path: str) -> None:
    """Absolute paths, dots and names of directories are refused before anything is opened."""
    (tmp_path / "root" / "a").mkdir()
    with pytest.raises(PathOutsideRootsError):
        os_utils.open_append_beneath(root, path)
    assert sorted(os.listdir(tmp_path)) == ["root"]


def test_append_follows_no_link(root: int, tmp_path: Path) -> None:
    """Links in any place of the path, dangling or not, are refused and nothing is created."""
    base = tmp_path / "root"
    (tmp_path / "outside").mkdir()
    (base / "directory").symlink_to(tmp_path / "outside")
    (base / "dangling").symlink_to(tmp_path / "outside" / "made")
    (tmp_path / "outside" / "secret").write_text("secret")
    (base / "file").symlink_to(tmp_path / "outside" / "secret")
    for path in ("directory/new", "dangling", "file", "file/new"):
        with pytest.raises(UnsafePathError):
            os_utils.open_append_beneath(root, path)
    assert os.listdir(tmp_path / "outside") == ["secret"]


def test_append_refuses_what_is_no_plain_file(root: int, tmp_path: Path) -> None:
    """A pipe does not block us, and a second name of another file is not written to."""
    base = tmp_path / "root"
    os.mkfifo(base / "fifo")
    (tmp_path / "victim").write_text("x")
    os.link(tmp_path / "victim", base / "hard")
    (base / "directory").mkdir()
    reader = os.open(base / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in ("fifo", "hard", "directory"):
            with pytest.raises(OSError, match=r"regular|directory"):
                os_utils.open_append_beneath(root, path)
    finally:
        os.close(reader)
    with pytest.raises(OSError, match="No such device"):
        os_utils.open_append_beneath(root, "fifo")
    with pytest.raises(FileNotFoundError):
        os_utils.open_append_beneath(root, "missing/file")


def test_append_cannot_be_raced_outside(root: int, tmp_path: Path) -> None:
    """While a directory is swapped for a link to the outside, nothing is ever written there."""
    outside, base = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (base / "d").mkdir()
    (base / "link").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(base / "d", base / "kept")
            os.rename(base / "link", base / "d")
            os.rename(base / "d", base / "link")
            os.rename(base / "kept", base / "d")

    thread = threading.Thread(target=swap)
    thread.start()
    outcomes: set[str] = set()
    deadline = time.monotonic() + 30.0
    attempts = 0
    try:
        # On a busy machine the two threads may run in step for a while.
        while attempts < 3000 or ("opened" not in outcomes and time.monotonic() < deadline):
            attempts += 1
            try:
                os.close(os_utils.open_append_beneath(root, "d/file"))
                outcomes.add("opened")
            except (UnsafePathError, FileNotFoundError) as error:
                outcomes.add(type(error).__name__)
    finally:
        stop.set()
        thread.join(30.0)
    assert os.listdir(outside) == []
    assert "opened" in outcomes


def test_atomic_write_replaces_whole_and_sets_the_mode(tmp_path: Path) -> None:
    """A file is replaced with the whole content and exactly the asked mode, whatever the umask."""
    path = tmp_path / "file"
    old = os.umask(0o777)
    try:
        for data, mode in ((b"", 0o600), (bytearray(b"abc"), 0o644), (memoryview(b"d"), 0o600)):
            os_utils.atomic_write(str(path), data, mode, fsync=mode == 0o600)
            assert path.stat().st_mode & 0o7777 == mode
            assert path.read_bytes() == bytes(data)
    finally:
        os.umask(old)
    assert os.listdir(tmp_path) == ["file"]


def test_atomic_write_follows_the_umask_on_request(tmp_path: Path) -> None:
    """Without a mode the file gets the permissions of any new file."""
    (tmp_path / "plain").touch()
    os_utils.atomic_write(tmp_path / "file", b"x", mode=None)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_atomic_write_replaces_a_link(tmp_path: Path) -> None:
    """A link under the name is replaced, and what it pointed to is untouched."""
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "link").symlink_to("target")
    os_utils.atomic_write(str(tmp_path / "link"), b"new")
    assert (tmp_path / "target").read_bytes() == b"kept"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == b"new"


def test_atomic_write_leaves_devices_and_pipes(tmp_path: Path) -> None:
    """What is no file is not replaced by one."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        os_utils.atomic_write(str(tmp_path / "pipe"), b"new")
    assert (tmp_path / "pipe").is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_atomic_write_takes_relative_and_long_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare name and a name as long as the file system takes can both be written."""
    monkeypatch.chdir(tmp_path)
    for name in ("bare", "\u00e9" * 127):
        os_utils.atomic_write(name, b"x")
        assert Path(name).read_bytes() == b"x"


def test_failed_atomic_write_leaves_the_old_content_alone(tmp_path: Path) -> None:
    """A write that cannot finish leaves neither a changed file nor a temporary one."""
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        os_utils.atomic_write(str(tmp_path / "directory"), b"x")
    with pytest.raises(FileNotFoundError):
        os_utils.atomic_write(str(tmp_path / "missing" / "file"), b"x")
    (tmp_path / "file").write_bytes(b"old")
    program = (
        "import resource, signal, sys\n"
        "from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    atomic_write(sys.argv[1], b'x' * 2000)\n"
        "except OSError as error:\n"
        "    print(error.errno)\n"
    )
    arguments = [sys.executable, "-B", "-c", program, str(tmp_path / "file")]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=150)
    assert result.stdout.strip() == str(errno.EFBIG)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_readers_never_see_a_part(tmp_path: Path) -> None:
    """While a file is rewritten, each look at it shows one whole version."""
    path = tmp_path / "file"
    versions = [bytes([65 + n]) * (20_000 + n) for n in range(8)]
    os_utils.atomic_write(str(path), versions[0], fsync=False)
    stop = threading.Event()

    def rewrite() -> None:
        source = random.Random(5)
        while not stop.is_set():
            os_utils.atomic_write(str(path), source.choice(versions), fsync=False)

    writers = [threading.Thread(target=rewrite) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            assert path.read_bytes() in versions
    finally:
        stop.set()
        for writer in writers:
            writer.join(30.0)
    assert os.listdir(tmp_path) == ["file"]


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    """Every function takes what `os.fspath` takes, and answers with text."""
    private = os_utils.private_dir(tmp_path / "a")
    assert private == str(tmp_path / "a")
    os_utils.atomic_write(tmp_path / "a" / "f", b"x")
    root = os.open(private, os.O_RDONLY)
    try:
        os.close(os_utils.open_append_beneath(root, Path("f")))
    finally:
        os.close(root)
    os_utils.validate_directory(tmp_path / "a")
    os_utils.validate_filepath(tmp_path / "a" / "f")
    assert os_utils.read_regular_file(tmp_path / "a" / "f", 10) == b"x"
    found = os_utils.resolve_under_allowed_roots(tmp_path / "a" / "f", [tmp_path])
    assert found == str(tmp_path / "a" / "f")
    with pytest.raises(ValueError, match="outside"):
        os_utils.resolve_under_allowed_roots(tmp_path.parent, [tmp_path])


def test_private_dir_is_made_with_its_parents(tmp_path: Path) -> None:
    """New directories are closed to others, whatever the umask, and a second call is fine."""
    path = tmp_path / "a" / "b"
    old = os.umask(0)
    try:
        assert os_utils.private_dir(str(path)) == str(path)
        assert os_utils.private_dir(str(path) + "/") == str(path) + "/"
    finally:
        os.umask(old)
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent)] == [0o700, 0o700]


def test_private_dir_closes_an_own_directory(tmp_path: Path) -> None:
    """A directory of ours that others could read is closed; one they could write to is refused."""
    readable = make_directory(tmp_path / "readable", 0o755)
    os_utils.private_dir(str(readable))
    assert readable.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o702, 0o1777):
        writable = make_directory(tmp_path / f"{mode:o}", mode)
        with pytest.raises(UnsafePathError, match="others may write"):
            os_utils.private_dir(str(writable))


@pytest.mark.parametrize("make", [bad_file, bad_link, bad_dangling])
def test_private_dir_refuses_what_is_none(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """A file or a link under the name is refused."""
    with pytest.raises(UnsafePathError):
        os_utils.private_dir(str(make(tmp_path)))


@as_root
def test_private_dir_refuses_a_foreign_one(tmp_path: Path) -> None:
    """A directory of somebody else is no private place, however it is closed."""
    path = make_directory(tmp_path / "foreign", 0o700)
    os.chown(path, NOBODY, -1)
    with pytest.raises(UnsafePathError, match="uid 65534"):
        os_utils.private_dir(str(path))


def test_tree_is_removed_without_following_links(root: int, tmp_path: Path) -> None:
    """All below a name goes, links are removed and not followed, and a repeat is fine."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    tree = tmp_path / "root" / "tree"
    (tree / "deep" / "deeper").mkdir(parents=True)
    (tree / "deep" / "file").write_text("x")
    (tree / "link").symlink_to(outside)
    (tree / "dangling").symlink_to("nowhere")
    os.mkfifo(tree / "fifo")
    os_utils.remove_tree_at("tree", root)
    os_utils.remove_tree_at("tree", root)
    assert os.listdir(tmp_path / "root") == []
    assert os.listdir(outside) == ["kept"]
    (tmp_path / "root" / "tree").symlink_to(outside)
    os_utils.remove_tree_at("tree", root)
    assert os.listdir(outside) == ["kept"]


def test_two_may_remove_one_tree(root: int, tmp_path: Path) -> None:
    """Removing what somebody else removes at the same time is no error."""
    errors: list[BaseException] = []

    def remove() -> None:
        try:
            os_utils.remove_tree_at("tree", root)
        except OSError as error:
            errors.append(error)

    for _ in range(20):
        for number in range(30):
            (tmp_path / "root" / "tree" / str(number % 5)).mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / "tree" / str(number % 5) / f"f{number}").write_text("")
        threads = [threading.Thread(target=remove) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert not errors
        assert os.listdir(tmp_path / "root") == []


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_regular_file_is_refused_and_closed(tmp_path: Path, kind: str) -> None:
    """A directory or a pipe is an error at once, and no descriptor stays open."""
    path = tmp_path / "it"
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not a regular file"):
        os_utils.read_regular_file(str(path), 10)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_is_waited_for_until_a_deadline(tmp_path: Path) -> None:
    """A lock that is given back in time is taken; one that is kept is a BlockingIOError."""
    path = tmp_path / "lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    holder, waiter, third = (os.open(path, flags, 0o600) for _ in range(3))
    os_utils.lock_file(holder)
    with pytest.raises(BlockingIOError, match=os.strerror(errno.EAGAIN)):
        os_utils.lock_file(waiter)
    with pytest.raises(BlockingIOError, match=r"has had the lock for 0\.05 s"):
        os_utils.lock_file(waiter, 0.05)
    releaser = threading.Timer(0.2, os.close, [holder])
    releaser.start()
    os_utils.lock_file(third, 60.0)
    releaser.join()
    with pytest.raises(BlockingIOError):
        os_utils.lock_file(waiter)
    os.close(third)
    os_utils.lock_file(waiter, 60.0)
    os.close(waiter)


def test_an_error_of_a_lock_that_is_waited_for_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that loses its locks is no other holder; it is asked less and less often."""
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    numbers = iter((*[errno.EAGAIN] * 9, errno.ENOLCK))
    pauses: list[float] = []
    monkeypatch.setattr(os_utils.time, "sleep", pauses.append)

    def flock(_descriptor: int, _operation: int) -> None:
        number = next(numbers)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os_utils.fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No locks available"):
        os_utils.lock_file(descriptor, 30.0)
    assert pauses == pytest.approx([0.001 * 2**n for n in range(7)] + [0.1, 0.1])
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_shared_memory_is_a_file_where_the_kernel_gives_none(tmp_path: Path, monkeypatch) -> None:
    """The first directory that takes it has a file of that size, without a name."""
    monkeypatch.setenv("NVRX_FORCE_NO_MEMFD", "1")
    places = [str(tmp_path / "missing"), str(tmp_path)]
    descriptor = os_utils.shared_memory("nvrx-page", 4096, places)
    assert os.fstat(descriptor).st_size == 4096
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path))
    os.close(descriptor)
    assert not list(tmp_path.iterdir())


def test_shared_memory_that_has_no_room_names_the_directory(tmp_path: Path, monkeypatch) -> None:
    """Allocating blocks fails without a path: the error says what was made, where and why not."""

    def allocate(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("NVRX_FORCE_NO_MEMFD", "1")
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(OSError, match="no shared memory 'nvrx-page': No space left") as raised:
        os_utils.shared_memory("nvrx-page", 4096, [str(tmp_path)])
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert not list(tmp_path.iterdir())
