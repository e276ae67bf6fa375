# SPDX-License-Identifier: Apache-2.0
"""Ask Slurm's own programs about jobs: few calls, each with a time limit, for many jobs at once."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nvidia_resiliency_ext.services.smonsvc.models import JobState, SlurmJob
from nvidia_resiliency_ext.shared_utils.console import plain
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

__all__ = ["JobRecord", "SlurmClient", "SlurmError", "expand_path"]

logger = logging.getLogger("nvrx")

_PROGRAMS = ("squeue", "scontrol", "sacct")
# The name comes last: its owner may write anything into it.
_QUEUE_FORMAT = "%A|%T|%u|%P|%N|%F|%K|%S|%j"
_QUEUE_FIELDS = 9
_SACCT_FIELDS = "JobIDRaw,State,ExitCode,NodeList,FailedNode"
_SACCT_COUNT = 5
# Variables by which users change what these programs print.
_FOREIGN = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_JOB_ID", "SLURM_TIME_FORMAT")
_KEY = re.compile(r"^\s*(JobState|NodeList|StdOut)=(.*)$")
_JOB_ID = re.compile(r"^JobId=(\d+)\b")
_EXIT_CODE = re.compile(r"\bExitCode=(\d+:\d+)")
_RESTARTS = re.compile(r"\bRestarts=(\d+)")
_PATTERN = re.compile(r"%(\d{0,3})([AaJjNnstux%])")
_NODE = re.compile(r"([A-Za-z0-9._-]+?)(?:\[([0-9]+)[^\]]*\])?(?:,|$)")
_MOST_JOBS_AT_ONCE = 200
_NOTHING = frozenset({"", "(null)", "None", "None assigned", "Unknown"})


class SlurmError(NvrxError):
    """A program of Slurm failed, or took too long."""


@dataclass(frozen=True)
class JobRecord:
    """Slurm's record of one job.

    Attributes:
        state: Its state.
        log_path: Its output; empty: not known.
        exit_code: As Slurm writes it (`1:0`: code and signal).
        nodes: Its nodes.
        failed_node: The node whose failure ended it.
        restarts: How often it was requeued; -1: not said.
    """

    state: JobState
    log_path: str = ""
    exit_code: str = ""
    nodes: str = ""
    failed_node: str = ""
    restarts: int = -1

    def evidence(self) -> tuple[str, ...]:
        """Return Slurm's statement about the end of the job, as lines of a log."""
        line = f"State={self.state.value} ExitCode={self.exit_code} NodeList={self.nodes}"
        said = (plain(line[:1000]),)
        if self.failed_node:  # first: the first line of a kind is the one that is taken
            return (plain(f"Node failure on {self.failed_node[:255]}"), *said)
        return said


class SlurmClient:
    """Runs `squeue`, `scontrol` and `sacct`.

    Args:
        timeout_s: Seconds that one call may take. Default 60.
        user: Only this user's jobs; None: those of all.
        partitions: Only jobs in these; empty: in all.

    Raises:
        ConfigError: A program is not on PATH.
    """

    def __init__(
        self, timeout_s: float = 60.0, user: str | None = None, partitions: Sequence[str] = ()
    ) -> None:
        for name in _PROGRAMS:
            if shutil.which(name) is None:
                raise ConfigError(f"{name} is not on PATH: the monitor needs Slurm's programs")
        self._timeout_s = timeout_s
        self._user = user
        self._partitions = tuple(partitions)

    def queue(self) -> list[SlurmJob]:
        """Return the jobs that run or complete.

        Raises:
            SlurmError: squeue fails.
        """
        argv = ["squeue", "--noheader", "--states=RUNNING,COMPLETING", f"--format={_QUEUE_FORMAT}"]
        if self._user is not None:
            argv.append(f"--user={self._user}")
        if self._partitions:
            argv.append(f"--partition={','.join(self._partitions)}")
        found = []
        for line in self._run(argv).splitlines():
            fields = line.split("|", _QUEUE_FIELDS - 1)
            if len(fields) != _QUEUE_FIELDS or not fields[0].isdecimal():
                continue
            job_id, state, user, partition, nodes, array, index, started, name = fields
            is_member = index.isdecimal()
            found.append(
                SlurmJob(
                    job_id,
                    JobState.from_str(state),
                    user,
                    partition,
                    nodes,
                    name,
                    array if is_member else "",
                    index if is_member else "",
                    started,
                )
            )
        return found

    def records(self, jobs: Sequence[str]) -> dict[str, JobRecord]:
        """Return Slurm's records of jobs: from the controller, else from the accounting.

        Args:
            jobs: Numbers of the jobs.

        Raises:
            SlurmError: Neither of the two answers.
        """
        wanted = set(jobs)
        if not wanted:
            return {}
        problem: SlurmError | None = None
        try:
            known = _records_of(self._run(["scontrol", "show", "jobs"]))
        except SlurmError as error:
            known, problem = {}, error
        found = {job_id: record for job_id, record in known.items() if job_id in wanted}
        missing = sorted(wanted - found.keys())
        for start in range(0, len(missing), _MOST_JOBS_AT_ONCE):
            try:
                found |= self._accounting(missing[start : start + _MOST_JOBS_AT_ONCE])
            except SlurmError as error:
                if problem is not None:
                    raise problem from error
                logger.warning("%s: %d jobs are unknown for now", error, len(missing))
                break
        return found

    def _accounting(self, jobs: Sequence[str]) -> dict[str, JobRecord]:
        try:
            rows = self._sacct(jobs, ",StdOut")
        except SlurmError:
            rows = self._sacct(jobs)  # Slurm before 24.05
        return {job_id: replace(record, log_path=path) for job_id, path, record in rows}

    def earlier_runs(self, jobs: Sequence[str]) -> dict[tuple[str, str], JobRecord]:
        """Return how runs of requeued jobs ended, by number and start; empty without accounting.

        Args:
            jobs: Numbers of the jobs.
        """
        if not jobs:
            return {}
        try:
            rows = self._sacct(jobs, ",Start", "--duplicates")
        except SlurmError as error:
            logger.warning("%s: how runs of %d requeued jobs ended is unknown", error, len(jobs))
            return {}
        return {(job_id, started): record for job_id, started, record in rows}

    def _sacct(
        self, jobs: Sequence[str], last_field: str = "", *flags: str
    ) -> list[tuple[str, str, JobRecord]]:
        """Return number, value of the last field, and record of each row of the accounting."""
        base = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}"]
        text = self._run([*base, *flags, f"--format={_SACCT_FIELDS}{last_field}"])
        found = []
        for line in text.splitlines():
            job_id, *rest = line.split("|", _SACCT_COUNT)
            if len(rest) >= _SACCT_COUNT - 1:
                state, exit_code, nodes, failed, *last = map(_value, rest)
                record = JobRecord(JobState.from_str(state), "", exit_code, nodes, failed)
                found.append((job_id, "".join(last), record))
        return found

    def _run(self, argv: Sequence[str]) -> str:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        try:
            done = subprocess.run(
                argv,
                env={**environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{argv[0]} did not end within {self._timeout_s:g} s") from None
        except OSError as error:
            raise SlurmError(f"{argv[0]} cannot be run: {error.strerror}") from None
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            why = plain(said[-1][:300]) if said else f"exit code {done.returncode}"
            raise SlurmError(f"{argv[0]} failed: {why}")
        return done.stdout.decode("utf-8", "replace")


def expand_path(pattern: str, job: SlurmJob) -> str:
    """Return an output path with Slurm's patterns (`%j` and others) replaced.

    A number after the percent sign is the least width of a number, filled with zeros.

    Args:
        pattern: The path as Slurm reports it.
        job: The job.

    Example:
        >>> job = SlurmJob("42", JobState.RUNNING, "ada", "batch", "n[1-3]", "train")
        >>> expand_path("/logs/%x-%6j.%N.out", job)
        '/logs/train-000042.n1.out'
    """
    first = _NODE.match(job.nodes)
    node = "" if first is None else first[1] + (first[2] or "")
    values = {
        "A": job.array_id or job.job_id,
        "a": job.array_index or "4294967294",
        "J": job.job_id,
        "j": job.job_id,
        "N": node.partition(".")[0],
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": job.user,
        "x": job.name,
        "%": "%",
    }

    def value(found: re.Match[str]) -> str:
        text = values[found[2]]
        return text.zfill(int(found[1])) if found[1] and text.isdecimal() else text

    return _PATTERN.sub(value, pattern)


def _records_of(text: str) -> dict[str, JobRecord]:
    """Return the jobs in the output of `scontrol show jobs`.

    Only the beginnings of lines count: a job's name stands in the middle of one.
    """
    found: dict[str, JobRecord] = {}
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").split("\n")
        first = _JOB_ID.match(lines[0])
        if first is None:
            continue
        values: dict[str, str] = {}
        for line in lines[1:]:
            pair = _KEY.match(line)
            if pair is not None:
                values[pair[1]] = pair[2].strip()
            elif line.lstrip().startswith("Requeue="):
                code, restarts = _EXIT_CODE.search(line), _RESTARTS.search(line)
                values["ExitCode"] = code[1] if code else ""
                values["Restarts"] = restarts[1] if restarts else "-1"
        state = JobState.from_str(values.get("JobState", ""))
        path = _value(values.get("StdOut", ""))
        nodes = _value(values.get("NodeList", ""))
        count = int(values.get("Restarts", "-1"))
        record = JobRecord(state, path, values.get("ExitCode", ""), nodes, restarts=count)
        found[first[1]] = record
    return found


def _value(text: str) -> str:
    return "" if text in _NOTHING else text
