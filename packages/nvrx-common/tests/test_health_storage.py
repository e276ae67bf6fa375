# SPDX-License-Identifier: Apache-2.0
"""Checks of storage: mounts, paths, and children that hang or cannot be killed."""

import os
import signal
import sys
import threading
import time

import pytest

from nvidia_resiliency_ext.shared_utils._health import probes, storage
from nvidia_resiliency_ext.shared_utils._health.probes import Probe, abandoned_probes
from nvidia_resiliency_ext.shared_utils._health.storage import (
    Mount,
    evaluate_mount,
    evaluate_paths,
    parse_mounts,
    parse_object,
)
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.clock import ManualClock
from nvidia_resiliency_ext.shared_utils.health_check import (
    DistributedStorageHealthCheck,
    StoragePathHealthCheck,
)
from nvidia_resiliency_ext.testing_utils.fake_hardware import fake_sysfs

# What is killed ends when its turn comes: that may take longer than a check would wait.
KILL_WAIT_S = 30.0
HANG = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


def mountinfo(tmp_path, *mounts):
    """Write a list of mounts: path, type, options."""
    path = tmp_path / "mountinfo"
    lines = [
        f"{number} 1 0:{number} / {place} {options} shared:1 - {kind} server:/x {options}\n"
        for number, (place, kind, options) in enumerate(mounts, 30)
    ]
    path.write_text("".join(lines))
    return str(path)


def check_of(tmp_path, *mounts, **options):
    root = tmp_path / "sys"
    return DistributedStorageHealthCheck(
        mountinfo=mountinfo(tmp_path, *mounts), sysfs_root=root, **options
    )


def test_nothing_mounted_is_skipped(tmp_path) -> None:
    """Without network file system there is nothing to look at."""
    check = check_of(tmp_path, ("/", "ext4", "rw"))
    assert check.check().status == "skipped"


@pytest.mark.parametrize("kind", ["lustre", "nfs", "nfs4"])
def test_mount_that_answers(tmp_path, kind) -> None:
    """A mount that can be listed is healthy, with its space as evidence."""
    result = check_of(tmp_path, (tmp_path, kind, "rw")).check()
    assert result.status == "healthy"
    assert result.evidence[str(tmp_path)]["blocks"] > 0


def test_mount_that_cannot_be_listed(tmp_path) -> None:
    """A mount that fails is unhealthy and named; others do not hide it."""
    gone = tmp_path / "gone with blank"
    check = check_of(
        tmp_path, (tmp_path, "nfs", "rw"), (str(gone).replace(" ", "\\040"), "nfs4", "rw")
    )
    assert check.check().reason == f"{gone} (nfs4): cannot be listed: No such file or directory"


def test_other_kinds_by_parameter(tmp_path) -> None:
    """Types of file systems are a parameter."""
    mounts = ((tmp_path / "gone", "beegfs", "rw"),)
    assert check_of(tmp_path, *mounts)()
    assert not check_of(tmp_path, *mounts, kinds=["beegfs"])()


def test_lustre_health(tmp_path) -> None:
    """Lustre's own word counts: anything but healthy is unhealthy."""
    tree = fake_sysfs(tmp_path / "sys")
    tree.set_lustre("healthy")
    assert check_of(tmp_path).check().status == "healthy"
    tree.set_lustre("NOT HEALTHY")
    assert check_of(tmp_path).check().reason == "Lustre says: NOT HEALTHY"


def test_mount_that_becomes_read_only(tmp_path) -> None:
    """A mount that was writable at the start is unhealthy once it is read-only."""
    check = check_of(tmp_path, (tmp_path, "nfs", "rw"))
    assert check()
    mountinfo(tmp_path, (tmp_path, "nfs", "ro"))
    assert "has become read-only" in check.check().reason
    assert check_of(tmp_path, (tmp_path, "nfs", "ro"))()


def test_full_file_system(tmp_path) -> None:
    """A file system with too little space is unhealthy."""
    mounts = ((tmp_path, "nfs", "rw"),)
    assert (
        "of its space is free" in check_of(tmp_path, *mounts, min_free_fraction=1.1).check().reason
    )
    assert check_of(tmp_path, *mounts, min_free_fraction=0.0)()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"error": "Stale file handle"}, "cannot be listed: Stale file handle"),
        ({"blocks": 100, "blocks_free": 9}, "only 9.0% of its space is free"),
        ({"files": 100, "files_free": 4}, "only 4.0% of its inodes are free"),
        ({"blocks": 0, "blocks_free": 0, "files": 0, "files_free": 0}, None),
        ({"blocks": "x"}, None),
    ],
)
def test_evaluate_mount(answer, problem) -> None:
    """What a probe says is evaluated by the limits; file systems that count nothing pass."""
    assert evaluate_mount(answer, 0.1, 0.05) == problem


def test_evaluate_paths() -> None:
    """Each kind of problem is named with its paths."""
    assert evaluate_paths({"invalid": [], "missing": [], "unreadable": []}) is None
    assert (
        evaluate_paths({"missing": ["/a"], "unreadable": ["/b"]}) == "missing: /a; unreadable: /b"
    )
    assert parse_object(b"[1]") is None
    assert parse_object(b"rubbish") is None


def test_mountinfo_lines() -> None:
    """The last mount at a place counts, blanks are unescaped, rubbish is passed over."""
    text = (
        "30 1 0:30 / /a rw - nfs s:/x rw\n31 1 0:31 / /a\\040b ro,x - nfs4 s:/y rw\n"
        "32 1 0:32 / /a rw - tmpfs t rw\nrubbish\n33 1 0:33 / /c rw master:1 - lustre l ro\n"
    )
    assert parse_mounts(text, {"nfs", "nfs4", "lustre"}) == [
        Mount("/a b", "nfs4", "s:/y", True), Mount("/c", "lustre", "l", True),
    ]  # fmt: skip


@pytest.mark.parametrize("mark", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_mount_with_a_strange_name(tmp_path, mark) -> None:
    """A character that ends lines in other texts does not hide a mount."""
    check = check_of(tmp_path, (f"{tmp_path}/a{mark}b", "nfs", "rw"))
    assert "a?b (nfs): cannot be listed" in check.check().reason


def test_each_path_has_its_own_time(monkeypatch) -> None:
    """A path that waited for its turn is not late for that."""
    clock = ManualClock()
    monkeypatch.setattr(storage, "time", clock)
    monkeypatch.setattr(probes, "time", clock)
    monkeypatch.setattr(storage, "_AT_ONCE", 1)

    original = Probe.start.__func__

    def start(cls, argv):
        # What others took, however busy the machine is.
        clock.advance(16.0)
        return original(cls, argv)

    monkeypatch.setattr(Probe, "start", classmethod(start))
    paths = [f"/nvrx/{number}" for number in range(8)]
    quick = [sys.executable, "-S", "-c", "print('{}')"]
    asked = storage._Probes(*quick).ask(paths, each_s=30.0)
    assert list(asked.values()) == [{}] * len(paths)
    broken = [sys.executable, "-S", "-c", "print('[]')"]
    assert storage._Probes(*broken).ask(["/"], 30.0) == {"/": "the probe failed"}


def test_mounts_have_one_deadline(monkeypatch) -> None:
    """Mounts that hang do not hold up each other; one that had no turn says so."""
    monkeypatch.setattr(probes, "_KILL_WAIT_S", KILL_WAIT_S)
    monkeypatch.setattr(storage, "_AT_ONCE", 2)
    start = time.monotonic()
    asked = storage._Probes(*HANG).ask(["/a", "/b", "/c"], 0.3, 0.3)
    assert time.monotonic() - start < 10
    assert [answer.split(" within")[0] for answer in asked.values()] == [
        "does not answer", "does not answer", "was not asked: 2 others do not answer",
    ]  # fmt: skip
    assert abandoned_probes() == 0


def test_reason_is_one_bounded_line(caplog) -> None:
    """What a path holds cannot forge a line of the log, nor fill it."""
    for path in ("/a\n2026 [INFO] forged", "/" + "x" * 50_000):
        with caplog.at_level("WARNING", "nvrx"):
            result = StoragePathHealthCheck([path]).check()
        assert result.reason.isprintable()
        assert len(result.reason) < 2100
    assert "/a?2026" in caplog.messages[0]


def test_paths(tmp_path) -> None:
    """Paths that are there pass; missing ones, relative ones and no strings do not."""
    file = tmp_path / "file"
    file.write_text("x")
    assert StoragePathHealthCheck([str(file), str(tmp_path), None, ""])()
    assert StoragePathHealthCheck([None, ""]).check().status == "skipped"
    assert StoragePathHealthCheck(None).check().status == "skipped"
    for bad in (str(tmp_path / "none"), "relative", 5, "/a\0b"):
        assert StoragePathHealthCheck([str(file), bad]).check().status == "unhealthy"


@pytest.mark.parametrize("path", ["--help", "-h", "--write", "--"])
def test_path_is_never_an_option(tmp_path, path) -> None:
    """A path that looks like an option is a path, and a bad one."""
    assert not StoragePathHealthCheck([path, str(tmp_path)])()


def test_stopped_probe_is_killed(monkeypatch) -> None:
    """A probe that is stopped for real does not hold the check up, and is killed."""
    started = []
    original = Probe.start.__func__

    def start(cls, argv, **options):
        probe = original(cls, HANG, **options)
        os.kill(probe._child.pid, signal.SIGSTOP)
        started.append(probe)
        return probe

    monkeypatch.setattr(probes, "_KILL_WAIT_S", KILL_WAIT_S)
    monkeypatch.setattr(Probe, "start", classmethod(start))
    result = StoragePathHealthCheck(["/"], timeout_s=0.2).check()
    assert "does not answer" in result.reason
    assert started[0].has_ended()
    assert abandoned_probes() == 0


class Unkillable:
    """A child in uninterruptible sleep, as the kernel shows one: it ignores even SIGKILL."""

    stdout = None

    def __init__(self, release):
        self.release = release
        self.pipe = list(os.pipe())

    def fileno(self):
        return self.pipe[0]

    def poll(self):
        return ExitStatus(0) if self.release.is_set() else None

    def wait(self, _timeout_s=None):
        return self.poll()

    def signal_group(self, _signal):
        return True

    def close(self):
        while self.pipe:
            os.close(self.pipe.pop())


def test_unkillable_probe_is_left_behind_counted_and_not_repeated(monkeypatch) -> None:
    """A probe that cannot be killed is counted, asked no second time, and forgotten at its end."""
    release = threading.Event()
    started = []

    def start(_cls, argv, **_options):
        started.append(argv[-1])
        return Probe(Unkillable(release))

    monkeypatch.setattr(probes, "_KILL_WAIT_S", 0.01)
    monkeypatch.setattr(Probe, "start", classmethod(start))
    check = StoragePathHealthCheck(["/stuck", "/stuck2"], timeout_s=0.05)
    begin = time.monotonic()
    first = check.check()
    assert time.monotonic() - begin < 10
    assert "/stuck: does not answer" in first.reason
    assert abandoned_probes() == 2
    assert "/stuck: has hung for" in check.check().reason
    assert started == ["/stuck", "/stuck2"]
    release.set()
    assert abandoned_probes() == 0
    check.check()
    assert len(started) == 4


def test_probes_run_at_the_same_time(monkeypatch, tmp_path) -> None:
    """Many hanging mounts cost one deadline, not one each."""
    original = Probe.start
    monkeypatch.setattr(Probe, "start", lambda _argv: original(HANG))
    mounts = [(f"/m{number}", "nfs", "rw") for number in range(4)]
    check = check_of(tmp_path, *mounts, timeout_s=0.3)
    begin = time.monotonic()
    result = check.check()
    assert time.monotonic() - begin < 10
    assert result.reason.count("does not answer") == 4


@pytest.mark.slow
def test_hanging_mounts_leave_time_for_others(monkeypatch, tmp_path) -> None:
    """Mounts beyond those that are looked at together get their turn when others have ended."""
    monkeypatch.setattr(storage, "_AT_ONCE", 2)
    original = Probe.start
    monkeypatch.setattr(Probe, "start", lambda argv: original(HANG if argv[-1] == "/m0" else argv))
    mounts = [("/m0", "nfs", "rw"), *((tmp_path / str(n), "nfs", "rw") for n in range(5))]
    for number in range(5):
        (tmp_path / str(number)).mkdir()
    reason = check_of(tmp_path, *mounts, timeout_s=8.0).check().reason
    assert reason == "/m0 (nfs): does not answer within 8 s"


def test_talkative_probe_does_not_end(monkeypatch) -> None:
    """A probe that writes without end is stopped by the pipe, and by its deadline."""
    monkeypatch.setattr(probes, "_KILL_WAIT_S", KILL_WAIT_S)
    probe = Probe.start([sys.executable, "-S", "-c", "while True: print('x' * 65536)"])
    assert probe.result(0.2) is None
    probe.kill()
    assert probe.has_ended()
