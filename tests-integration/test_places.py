# SPDX-License-Identifier: Apache-2.0
"""Scenarios: the machine or the command line is not as it should be."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_jobs import WATCHED_SECTIONS

if TYPE_CHECKING:
    from fault_jobs import Job


def can_mount() -> bool:
    """Say whether this user may make a mount namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", *namespaces(), "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def namespaces() -> list[str]:
    """Return the options of unshare for this user."""
    return ["-m"] if os.geteuid() == 0 else ["-m", "-U", "-r"]


needs_mounts = pytest.mark.skipif(not can_mount(), reason="no mount namespaces for this user")


def within_mount(directory: Path, options: str, fill: str = "") -> list[str]:
    """Return what to put before a command, so that a small tmpfs lies on a directory."""
    script = f'mount -t tmpfs -o {options} none "$0" && {fill or "true"} && exec "$@"'
    return ["unshare", *namespaces(), "sh", "-c", script, str(directory)]


@needs_mounts
def test_a_full_log_directory(job: Job) -> None:
    """When the log directory is full the job still restarts and ends well, and the log says so."""
    logs = job.folder / "logs"
    logs.mkdir()
    job.start(
        *("--last-cycle", "1", "--client", "0:1:die"),
        flags=("--log-dir", str(logs), "--redirects", "3", *WATCHED_SECTIONS),
        prefix=within_mount(
            logs, "size=64k", fill=f"(cat /dev/zero > {logs}/filler 2>/dev/null || true)"
        ),
        environment={"NVRX_EVENT_DIR": None},
    )
    code = job.wait()
    log = job.log()
    assert "No space left" in log or "ENOSPC" in log, log
    assert "Traceback" not in log, log
    assert (code, job.cycles()) in ((0, [0, 1]), (1, [])), log


@needs_mounts
@pytest.mark.parametrize("flag", ["--redirects", "--tee"])
@pytest.mark.parametrize("prewarm", ["off", "on"])
def test_a_log_directory_that_fills_up_costs_one_restart(job: Job, flag: str, prewarm: str) -> None:
    """Ranks that cannot write end; those of the next cycle write to the console and end well."""
    logs = job.folder / "logs"
    logs.mkdir()
    program = job.folder / "talking_rank.py"
    program.write_text(
        "import os\nfor line in range(20_000):\n    print('line', line)\nos.write(1, b'DONE')\n"
    )
    job.start(
        flags=("--log-dir", str(logs), flag, "3", "--ft-prewarm-import", "decimal"),
        prewarm=prewarm,
        program=program,
        max_restarts=1,
        prefix=within_mount(logs, "size=64k"),
        environment={"NVRX_EVENT_DIR": None},
    )
    assert job.wait() == 0, job.log()
    log = job.log()
    assert "cycle 1: " in log
    assert "No space left on device; workers write to the console instead" in log
    assert log.count("DONE") == 2, log[-2000:]


@needs_mounts
def test_a_full_record_directory_does_not_stop_the_job(job: Job) -> None:
    """A record that cannot be written is missed, not died of."""
    job.start(
        *("--last-cycle", "1", "--client", "0:1:die"),
        flags=WATCHED_SECTIONS,
        prefix=within_mount(
            job.record, "size=4k", fill=f"(cat /dev/zero > {job.record}/filler 2>/dev/null || true)"
        ),
    )
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]
    assert "Traceback" not in job.log()


@needs_mounts
def test_a_read_only_log_directory_is_an_error_in_one_line(job: Job) -> None:
    """A log directory that cannot be written is bad input: one line that names it, and 2."""
    logs = job.folder / "logs"
    logs.mkdir()
    job.start(
        flags=("--log-dir", str(logs), "--redirects", "3"),
        prefix=within_mount(logs, "ro"),
        environment={"NVRX_EVENT_DIR": None},
    )
    assert job.wait() == 2
    assert str(logs) in job.log()
    assert job.log().count("\n") == 1, job.log()
    assert job.cycles() == []


def test_a_fixed_port_in_use_is_an_error_at_start(job: Job) -> None:
    """A master port that the user fixed and somebody else uses ends the launcher with 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job.start(flags=("--master-addr", "127.0.0.1", "--master-port", str(port)))
        assert job.wait() == 1, job.log()
    assert str(port) in job.log()
    assert "Traceback" not in job.log(), job.log()


def test_a_missing_script(job: Job) -> None:
    """A script that is not there fails the job with 1 or 2 and is named."""
    job.start(program=Path("/no/such/script.py"), max_restarts=0)
    assert job.wait() in (1, 2)
    assert "/no/such/script.py" in job.log()


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_an_impossible_number_of_ranks(job: Job, value: str) -> None:
    """A number of ranks that cannot be is a bad argument: exit code 2, one line."""
    job.start(nproc=value)
    assert job.wait() == 2
    assert "nproc" in job.log()
    assert "Traceback" not in job.log(), job.log()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fault_tolerance: {rank_heartbeat_timeout: [1, 2\n", "settings.yaml"),
        ("fault_tolerance:\n  rank_heartbeat_timeot: 3\n", "rank_heartbeat_timeout"),
        ("fault_tolerance:\n  rank_termination_signal: SIGNOTHING\n", "SIGNOTHING"),
        ("other: 1\n", "settings.yaml"),
    ],
)
def test_a_bad_settings_file(job: Job, text: str, named: str) -> None:
    """A settings file that cannot be used ends the launcher with 2 and says what is wrong."""
    path = job.folder / "settings.yaml"
    path.write_text(text)
    job.start(flags=("--ft-cfg-path", str(path)))
    assert job.wait() == 2
    assert named in job.log()
    assert "Traceback" not in job.log(), job.log()
    assert job.cycles() == []


def test_a_temporary_directory_with_a_long_path(job: Job) -> None:
    """Where TMPDIR is too long for sockets the run directory lies elsewhere; all works."""
    long = job.temporary / ("d" * 90) / ("e" * 90)
    long.mkdir(parents=True)
    job.start(
        *("--last-cycle", "1", "--client", "0:1:hang"),
        flags=WATCHED_SECTIONS,
        environment={"TMPDIR": str(long)},
    )
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]
    long.rmdir()
    long.parent.rmdir()


@pytest.mark.no_second_try
def test_output_of_a_rank_that_leaves_in_a_hurry(job: Job) -> None:
    """All of what a rank wrote right before `_exit` is in its log file."""
    script = job.folder / "hurry.py"
    script.write_text(
        "import os\n"
        "data = b'x' * 1023 + b'\\n'\n"
        "for _ in range(1024): os.write(1, data)\n"
        "os._exit(0)\n"
    )
    logs = job.folder / "logs"
    job.start(
        program=script, nproc=1, flags=("--log-dir", str(logs), "--redirects", "1", "--tee", "2")
    )
    assert job.wait() == 0, job.log()
    assert sum(path.stat().st_size for path in logs.rglob("stdout.log")) == 2**20


def test_a_launcher_whose_output_nobody_reads(job: Job) -> None:
    """A launcher whose own output pipe is closed still restarts its ranks and ends well."""
    job.start("--last-cycle", "1", prefix=["sh", "-c", '"$@" 2>&1 | true', "sh"])
    job.wait_for(0, range(2), "stepped")
    os.kill(job.rank_pid(0, 0), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not (job.has(1, 0, "done") and job.has(1, 1, "done")):
        assert time.monotonic() < deadline, job.cycles()
        time.sleep(0.01)
    job.wait()


def test_names_that_are_no_utf8(job: Job) -> None:
    """A script, an argument and a role whose bytes are no UTF-8 run like any others."""
    script = job.folder / os.fsdecode(b"s\xe9.py")
    script.write_text("import os, sys\nprint(os.fsencode(sys.argv[1]), flush=True)\n")
    role = os.fsdecode(b"r\xf4le")
    job.start(
        os.fsdecode(b"\xff"),
        program=script,
        flags=("--role", role, "--tee", "3", "--log-dir", str(job.folder / "logs")),
    )
    assert job.wait() == 0, job.log()
    assert job.log().count(r"b'\xff'") == 2


@pytest.mark.parametrize("limit", [7, 11, 18, 21])
def test_few_descriptors_are_an_error_without_a_traceback(job: Job, limit: int) -> None:
    """A launcher or a monitor that cannot open what it needs says so, and the job ends with 1."""
    job.start(prefix=["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"], nproc=4, max_restarts=0)
    assert job.wait() == 1, job.log()
    assert "Too many open files" in job.log()
    assert "Traceback" not in job.log(), job.log()
