# SPDX-License-Identifier: Apache-2.0
"""`nvrx-slurm-health`: writes which units of a Slurm job have nodes that Slurm calls unavailable.

Run it in the batch script, or next to `nvrx-control`; launchers read its file with
`--ft-segment-health-check-dir`. Each run calls `sinfo` and `squeue` once. The format of the file
is in `_health/segment_health.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from nvidia_resiliency_ext.fault_tolerance._core.infra import expand_nodelist
from nvidia_resiliency_ext.fault_tolerance._health import segment_health
from nvidia_resiliency_ext.shared_utils.children import end_with_parent
from nvidia_resiliency_ext.shared_utils.console import open_missing_streams, plain, write_err
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write

__all__ = ["SlurmAnswerError", "excluded_units", "main", "publish", "unavailable_nodes"]

PROGRAM: Final = "nvrx-slurm-health"
COMMAND_DEADLINE_S: Final = 30.0
MOST_SECONDS: Final = 86400.0
# Launchers of other users of the project read it, too; it holds names of nodes and reasons.
FILE_MODE: Final = 0o644

# The states of which `sinfo -R` shows reasons. Slurm adds one character for what else is so.
_UNAVAILABLE: Final = frozenset({"down", "drained", "draining", "fail", "failing", "error"})
_ADDED: Final = "*~#!%$@+^-"
# A user's own choice of what these commands show.
_FILTERS: Final = ("SINFO_", "SQUEUE_")
_SINFO: Final = ("sinfo", "--noheader", "--Node", "--format=%N|%T|%E")
_SQUEUE: Final = ("squeue", "--noheader", "--array", "--format=%K|%N")


class SlurmAnswerError(RuntimeError):
    """Slurm gave no answer or an invalid one; the message names the command and the reason."""


def unavailable_nodes(sinfo: str) -> dict[str, str]:
    """Return the problem of each node that must not work, from the output of `sinfo`.

    Its lines are `NODE|STATE|REASON`.

    Raises:
        SlurmAnswerError: A line has another form.

    Example:
        >>> unavailable_nodes("n1|drained|bad NIC")
        {'n1': 'n1 drained: bad NIC'}
    """
    found: dict[str, str] = {}
    for line in sinfo.splitlines():
        node, state, reason = _fields(line, 3, "sinfo")
        if state.rstrip(_ADDED).lower() in _UNAVAILABLE:
            said = "" if reason in ("none", "") else f": {reason}"
            found[node] = plain(f"{node} {state}{said}")
    return found


def excluded_units(
    squeue: str, job_id: str, unavailable: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the units of `job_id`, a job or an array, with the problems of their nodes.

    Units without `unavailable` nodes (from `unavailable_nodes`) are left out. `squeue` is the
    output of that command, lines of `TASK|NODES`; the task of a plain job is `N/A`.

    Raises:
        SlurmAnswerError: A line has another form.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for line in squeue.splitlines():
        task, nodes = _fields(line, 2, "squeue")
        unit = task if task.isdecimal() else job_id
        try:
            names = expand_nodelist(nodes)
        except ValueError as error:
            raise SlurmAnswerError(f"squeue: {error}") from error
        found[unit] += [unavailable[name] for name in names if name in unavailable]
    return {unit: texts for unit, texts in found.items() if texts}


def publish(directory: str, job_id: str, environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Ask Slurm once, write the file of a job, and return the excluded units with their problems.

    With no excluded task the file is removed. `directory`, that of `--ft-segment-health-check-dir`,
    must exist. `job_id` is the job, or the array; `environ` is the environment of Slurm's commands.

    Raises:
        SlurmAnswerError: Slurm did not answer; the file is unchanged.
        OSError: The file cannot be written; it is unchanged.
    """
    unavailable = unavailable_nodes(_ask(_SINFO, environ))
    excluded = excluded_units(_ask((*_SQUEUE, f"--jobs={job_id}"), environ), job_id, unavailable)
    path = segment_health.state_file(directory, job_id)
    if not excluded:
        try:
            os.unlink(path)
        except FileNotFoundError:
            os.stat(directory)  # a directory that is not there is a mistake
        return excluded
    content = segment_health.state_text(excluded).encode()
    if content.index(b"\n") > segment_health.MAX_FIRST_LINE_BYTES:
        raise SlurmAnswerError(f"{len(excluded)} excluded tasks are more than a file can list")
    atomic_write(path, content, mode=FILE_MODE)
    return excluded


def _fields(line: str, count: int, command: str) -> list[str]:
    fields = [field.strip() for field in line.split("|", count - 1)]
    if len(fields) != count:
        raise SlurmAnswerError(
            f"{command} printed {plain(line[:200])!r}, which has no {count} parts"
        )
    return fields


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a command of Slurm and return its output."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
    except OSError as error:
        raise SlurmAnswerError(f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired:
        raise SlurmAnswerError(
            f"{command[0]} has not answered within {COMMAND_DEADLINE_S:g} s"
        ) from None
    if done.returncode != 0:
        said = plain(" ".join(done.stderr.decode(errors="replace").split())[:300])
        raise SlurmAnswerError(f"{command[0]} ended with exit code {done.returncode}: {said}")
    return done.stdout.decode(errors="replace")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < MOST_SECONDS:
        raise ValueError
    return seconds


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Write which tasks of a Slurm job array have nodes that Slurm calls down, "
        "drained or failing, for ft_launcher --ft-segment-health-check-dir; or whether a job has. "
        "While Slurm does not answer the file stays what it is; with no such task there is none.",
    )
    parser.add_argument("directory", help="the directory of that flag, which all nodes share")
    parser.add_argument(
        "--job-id", help="the job, or the array; by default the one that this runs in"
    )
    parser.add_argument(
        "--every",
        type=_seconds,
        metavar="SECONDS",
        help="look again and again until a signal, or the end of the batch script; by default once",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with `argv` (None: the process's arguments without its name) and exit.

    The exit code is 0, 1 if a single run failed, or 2 for a wrong command line.
    """
    open_missing_streams()
    parser = get_args_parser()
    args = parser.parse_args(argv)
    unit = segment_health.unit_of(os.environ)
    job_id = args.job_id or (unit.job_id if unit else "")
    if not job_id.isdecimal():
        parser.error("--job-id is needed outside a Slurm job, the number of the job or array")
    if not os.path.isabs(args.directory):
        parser.error(f"{args.directory} is no absolute path")
    # A file that is just being written is removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if args.every is not None:
        end_with_parent(signal.SIGTERM)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_FILTERS)}
    said: Mapping[str, Sequence[str]] = {}
    while True:
        try:
            excluded = publish(args.directory, job_id, environ)
        except (SlurmAnswerError, OSError) as error:
            write_err(f"{PROGRAM}: nothing is changed: {error}\n")
            if args.every is None:
                sys.exit(1)
        else:
            if excluded != said:
                write_err(f"{PROGRAM}: {_in_words(excluded, job_id)}\n")
            said = excluded
        if args.every is None:
            sys.exit(0)
        time.sleep(args.every)


def _in_words(excluded: Mapping[str, Sequence[str]], job_id: str) -> str:
    if not excluded:
        return "nobody is excluded any more"
    units = [
        f"{segment_health.Unit(job_id, task)} ({'; '.join(why)})" for task, why in excluded.items()
    ]
    return f"excluded: {', '.join(units)}"


if __name__ == "__main__":
    main()
