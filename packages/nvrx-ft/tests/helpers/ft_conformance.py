# SPDX-License-Identifier: Apache-2.0
"""Runs one program cold and from standby in the same way, and says where they differ.

No launcher takes part: a cold process and a standby are started with the same command, streams,
environment and folder.
"""

import json
import os
import re
import selectors
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from nvidia_resiliency_ext.fault_tolerance._workers import prewarmed as standbys
from nvidia_resiliency_ext.fault_tolerance._workers.command import WorkerCommand
from nvidia_resiliency_ext.shared_utils.children import start_child

PROGRAMS = Path(__file__).parent.parent / "programs"
PROBE = str(PROGRAMS / "ft_conformance_probe.py")
TIMEOUT_S = 150.0


EXIT_CASES = (
    "exit-0", "exit-3", "exit-none", "exit-text", "exit-300", "exit-true", "uncaught", "chained",
    "group", "missing-module", "os-exit", "abort", "sigkill", "sigsegv", "sigterm", "sigint",
    "sigpipe", "atexit", "daemon-thread", "thread", "unflushed", "read", "warnings",
)  # fmt: skip
CHILD_CASES = (
    "recursion", "fork", "pool-fork", "pool-spawn", "pool-forkserver", "subprocess", "execv",
    "title",
)  # fmt: skip
NUMPY_CASES = ("logging", "reimport")
TORCH_CASES = ("torch", "compile")


@dataclass(frozen=True)
class Setting:
    """How the program is run."""

    folder: Path
    imports: tuple[str, ...] = ()
    as_module: bool = False
    hook_folder: str = standbys.HOOK_FOLDER
    rank_env: dict = field(default_factory=dict)
    base_env: dict = field(default_factory=dict)
    stdin_text: str = "some input\n"

    def env(self):
        """Return the environment that all workers share."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "/there/is/nothing",
            "NVRX_TEST_WITHDRAWN": "yes",
            **self.base_env,
        }

    def worker_env(self):
        """Return the environment of the worker."""
        env = {**self.env(), "RANK": "3", "LOCAL_RANK": "1", "TZ": "Asia/Tokyo", **self.rank_env}
        env["TMPDIR"] = str(self.folder)
        del env["NVRX_TEST_WITHDRAWN"]
        return env

    def command(self, *args, program=PROBE):
        """Return the command that runs a program."""
        entry = Path(program).stem if self.as_module else program
        words = ("-m", entry) if self.as_module else (entry,)
        return WorkerCommand(
            (sys.executable, *words, *args), entry, is_module=self.as_module, is_python=True
        )


@dataclass(frozen=True)
class Result:
    """How a run ended and what it wrote."""

    status: str
    stdout: str
    stderr: str
    ready: standbys.Ready | None = None


def run_cold(setting, *args, program=PROBE):
    """Run the program in a fresh process."""
    with _Streams(setting) as streams:
        child = start_child(
            setting.command(*args, program=program).argv,
            env=setting.worker_env(),
            stdin=streams.fds[0],
            stdout=streams.fds[1],
            stderr=streams.fds[2],
            new_session=True,
            die_with_parent=True,
        )
        return streams.result(child)


def run_warm(setting, *args, program=PROBE, before_go=None):
    """Run the program in a standby that was told to go."""
    standby = standbys.PrewarmedWorker(
        setting.command(*args, program=program),
        setting.env(),
        0,
        paths=("a file", "a file"),
        imports=setting.imports,
        hook_folder=setting.hook_folder,
    )
    try:
        ready = receive(standby)
        if not isinstance(ready, standbys.Ready) or ready.problem is not None:
            raise AssertionError(ready)  # noqa: TRY301 - the standby is ended below
        if before_go is not None:
            before_go(standby)
        with _Streams(setting) as streams:
            standby.go(setting.worker_env(), streams.fds)
            begun = receive(standby)
            if not isinstance(begun, standbys.Begun):
                raise AssertionError(begun)  # noqa: TRY004, TRY301 - likewise
            standby.release()
            return streams.result(standby.child, ready)
    except BaseException:
        standby.end()
        raise


def receive(standby, timeout_s=TIMEOUT_S):
    """Wait for the next event of a standby."""
    with selectors.DefaultSelector() as selector:
        selector.register(standby, selectors.EVENT_READ)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if selector.select(deadline - time.monotonic()):
                event = standby.receive()
                if event is not None:
                    return event
    raise TimeoutError("no event of the standby")


class _Streams:
    """Three files for one run."""

    def __init__(self, setting):
        self._folder = setting.folder
        (self._folder / "in").write_text(setting.stdin_text)

    def __enter__(self):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
        self.fds = [
            os.open(self._folder / "in", os.O_RDONLY | os.O_CLOEXEC),
            os.open(self._folder / "out", flags, 0o644),
            os.open(self._folder / "err", flags, 0o644),
        ]
        return self

    def __exit__(self, *_):
        for fd in self.fds:
            os.close(fd)

    def result(self, child, ready=None):
        status = child.wait(TIMEOUT_S)
        child.close()
        if status is None:
            raise TimeoutError("the program does not end")
        texts = [(self._folder / name).read_text() for name in ("out", "err")]
        return Result(status.describe(), *map(normalised, texts), ready)


# Python's tracker of semaphores now and then says so at the end of a program with spawned children,
# fresh or from standby alike (seen in 1 of 50 fresh runs and 3 of 50 warm ones on a busy machine).
_TRACKER_NOISE = re.compile(
    r"^.*resource_tracker\.py:\d+: UserWarning: .*\n  warnings\.warn.*\n", re.MULTILINE
)


def normalised(text):
    """Return a text without addresses, process numbers and what varies between fresh workers."""
    text = _TRACKER_NOISE.sub("", text)
    text = re.sub(r"0x[0-9a-f]+", "0xADDRESS", text)
    return re.sub(r"\b(pid|PID|Process)([= -])\d+", r"\1\2N", text)


def state_of(run, setting, modules, **options):
    """Return the facts that the probe wrote."""
    path = setting.folder / "facts.json"
    path.unlink(missing_ok=True)
    result = run(setting, "state", str(path), modules, **options)
    if result.status != "exit code 0":
        raise AssertionError(result)
    return flat(json.loads(path.read_text()))


def flat(facts, prefix=""):
    """Return {dotted path: value} of nested objects."""
    found = {}
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = json.dumps(value, sort_keys=True)
    return found


def cold_states(setting, modules, times):
    """Run the probe several times in a fresh process; return the facts of each run."""
    return [state_of(run_cold, setting, modules) for _ in range(times)]


def state_differences(setting, modules, times=3, *, cold=None, **options):
    """Run the probe several times each way; return the keys in which they differ, with values.

    A key varies when its values differ between runs of one way; both ways must agree in that, and
    in the value where it does not vary. Facts of fresh processes that are there already are used.
    """
    cold = cold or cold_states(setting, modules, times)
    warm = [state_of(run_warm, setting, modules, **options) for _ in range(times)]
    found = {}
    for key in sorted({*cold[0], *warm[0]}):
        before = {facts.get(key) for facts in cold}
        after = {facts.get(key) for facts in warm}
        if (len(before) > 1) != (len(after) > 1):
            found[key] = (sorted(map(str, before)), sorted(map(str, after)))
        elif len(before) == 1 and before != after:
            found[key] = (before.pop(), after.pop())
    return found


def case_difference(setting, case):
    """Run one case each way; return the two results where they differ, else None."""
    words = (case, *setting.imports) if case == "logging" else (case,)
    cold, warm = run_cold(setting, *words), run_warm(setting, *words)
    same = (cold.status, cold.stdout, cold.stderr) == (warm.status, warm.stdout, warm.stderr)
    return None if same else (cold, warm)


def patched_hook(folder, *changes):
    """Return a folder with a copy of the hook in which texts are replaced."""
    text = (Path(standbys.HOOK_FOLDER) / "sitecustomize.py").read_text()
    for old, new in changes:
        if text.count(old) < 1:
            raise AssertionError(f"the hook has no {old!r} any more")
        text = text.replace(old, new)
    target = folder / "hook"
    target.mkdir()
    (target / "sitecustomize.py").write_text(text)
    return str(target)
