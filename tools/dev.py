# SPDX-License-Identifier: Apache-2.0
"""One command for each chore; it owns the order of tasks, hatch.toml owns what each task runs.

The first run makes a private hatch in ``.hatch/`` and the environment ``.venv/``. Nothing is
written outside the checkout, and it works from any folder. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HATCH_FOLDER = ROOT / ".hatch"
HATCH = HATCH_FOLDER / "bin" / "hatch"
HATCH_REQUIREMENT = "hatch>=1.18,<2"
OLDEST_PYTHON = (3, 10)
# pytest's exit codes
TESTS_FAILED = 1
NO_TESTS_COLLECTED = 5

ALONE = "alone"
# What fails in these is run once more, by itself: at the end, or by ALONE in its own environment.
TEST_STAGES = {ALONE, "test", "serial", "scenarios"}
# An option of pytest: tests-support/hostile.py.
HOSTILE = "--hostile"
# More failures than so many are no race.
SECOND_TRIES = 20

BOUNDED = "not gpu and not slurm and not slow"

Task = tuple[str, ...]

COMMANDS = {
    "demo": "the main job: a job with faults that recovers (under 60 s)",
    "test": "tests of all packages, then the integration scenarios; or only the given paths;"
    " --hostile: with what a careless shell leaves",
    "integration": "the integration scenarios; arguments go to pytest",
    "check": "lint, boundaries, types and generated files: what needs no test run",
    "alone": "build every wheel and test each one alone, then all together; or only the named ones",
    "docs": "build the documentation and run its code blocks",
    "fix": "format the code and fix what the linter can fix",
    "proto": "generate the protobuf modules again",
    "reference": "write the tables of docs/reference from the code again",
    "api": "compare the public names with the recorded ones; --write records them",
    "gpu": "the tests and scenarios that need a GPU",
    "slurm": "the scenarios that need Slurm (tools/slurm.sh install; as root)",
    "release": "--plan, or a distribution and major, minor, patch or a version",
    "ci": "check, docs, alone, test: what the pipeline runs",
}


def tasks_of(command: str, args: list[str]) -> list[Task]:
    """Return the hatch tasks that a command stands for, in order."""
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    if command == "test":
        return tests(args)
    if command == "ci":
        parts = ("check", "docs", "alone", "test")
        return [task for part in parts for task in tasks_of(part, [])]
    fixed: dict[str, list[Task]] = {
        "gpu": [
            ("serial", "-m", "gpu", str(ROOT / "packages")),
            ("integration", "-m", "gpu", str(ROOT / "tests-integration")),
        ],
        "slurm": [("integration", "-m", "slurm", str(ROOT / "tests-integration"))],
        "check": [
            ("lint:check",),
            ("boundaries",),
            ("types", *sources),
            ("types-tools",),
            ("proto:check",),
            ("reference", "--check"),
            ("docstrings",),
        ],
        "proto": [("proto:write",)],
        "docs": [("docs",), ("examples",), ("docstrings", "--examples")],
        "fix": [("lint:fix",)],
    }
    if command in fixed:
        return fixed[command]
    if command == "integration" and not args:
        args = ["-m", BOUNDED]
    if command == "integration" and not any(Path(arg).exists() for arg in args):
        args = [*args, str(ROOT / "tests-integration")]
    return [(command, *args)]


def tests(args: list[str]) -> list[Task]:
    """Return the test runs: in parallel, then those that need the machine, then scenarios.

    Scenarios run two at a time: each waits more than it works.
    """
    options = [arg for arg in args if arg == HOSTILE]
    given = [arg for arg in args if arg != HOSTILE]
    paths = given or [str(ROOT / "packages")]
    tasks: list[Task] = [
        ("test", "-m", "not serial", *options, *paths),
        ("serial", "-m", "serial", *options, *paths),
    ]
    if not given:
        tasks.append(("scenarios", "-m", BOUNDED, *options, str(ROOT / "tests-integration")))
    return tasks


def environment() -> dict[str, str]:
    """Return the environment of hatch: all that it keeps lies in the checkout."""
    env = dict(os.environ)
    unwanted = ("PYTHONHOME", "VIRTUAL_ENV", "HATCH_ENV", "HATCH_ENV_ACTIVE")
    # Tests start hundreds of programs: each would compile our modules again.
    for name in (*unwanted, "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    config = HATCH_FOLDER / "config.toml"
    config.touch()
    env["HATCH_CONFIG"] = str(config)
    env["HATCH_DATA_DIR"] = str(HATCH_FOLDER / "data")
    env["HATCH_CACHE_DIR"] = str(HATCH_FOLDER / "cache")
    env["VIRTUALENV_OVERRIDE_APP_DATA"] = str(HATCH_FOLDER / "virtualenv")
    env["UV_CACHE_DIR"] = str(HATCH_FOLDER / "uv")
    env.setdefault("PIP_CACHE_DIR", str(HATCH_FOLDER / "pip"))
    env.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    env["PATH"] = os.pathsep.join((str(HATCH.parent), env.get("PATH", os.defpath)))
    skip_extension = "STRAGGLER_DET_SKIP_CUPTI_EXT_BUILD"
    if skip_extension not in env and shutil.which(env.get("CXX", "c++")) is None:
        env[skip_extension] = "1"
        say(f"no C++ compiler found: nvrx-straggler goes without extension ({skip_extension}=1)")
    return env


def install_hatch() -> None:
    """Make the private hatch, unless it is there."""
    if HATCH.exists():
        return
    say(f"installing {HATCH_REQUIREMENT} in {HATCH_FOLDER}")
    # Without pip inside: this interpreter's pip, with its settings, installs into it.
    venv.EnvBuilder(clear=True).create(HATCH_FOLDER)
    env = {"PIP_CACHE_DIR": str(HATCH_FOLDER / "pip"), **os.environ}
    python = HATCH_FOLDER / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    quiet = ["install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *quiet, HATCH_REQUIREMENT], env=env, check=True)


def run(tasks: list[Task], *, second_try: bool = False) -> int:
    """Run the tasks in turn, all of them, and return the first failure's exit code.

    With `second_try` the tests that fail are run once more before they count.
    """
    env = environment()
    if any(":" not in task[0] for task in tasks):
        create = [str(HATCH), "-q", "env", "create"]
        if subprocess.run(create, cwd=ROOT, env=env, check=False).returncode:
            say("the environment could not be made")
            return 1
    failures: list[tuple[str, int]] = []
    stages = TestStages(ROOT / ".failures", env) if second_try else None
    for task in tasks:
        started = time.monotonic()
        if task[0] == ALONE:
            forget_wheels()
        say("== " + " ".join(arg.removeprefix(f"{ROOT}/") for arg in task))
        if stages is not None and task[0] in TEST_STAGES:
            code = stages.run(task)
        else:
            code = hatch_run(task, env)
        if task[0] in {"serial", "scenarios", "integration"} and code == NO_TESTS_COLLECTED:
            code = 0
        if code:
            failures.append((task[0], code))
        if len(tasks) > 1 and task is not tasks[-1]:
            say(f"== {task[0]}: exit code {code}, {time.monotonic() - started:.0f} s")
    if stages is not None and not stages.close():
        failures.append(("tests", TESTS_FAILED))
    if failures:
        say("failed: " + ", ".join(f"{name} ({code})" for name, code in failures))
        return failures[0][1]
    return 0


def hatch_run(task: Task, env: dict[str, str]) -> int:
    """Run one task of hatch.toml and return its exit code."""
    return subprocess.run([str(HATCH), "run", *task], cwd=ROOT, env=env, check=False).returncode


class TestStages:
    """Runs of pytest, and the second try of what failed in them.

    A test that a race made fail is run once more, alone, after all stages; the stage `alone` does
    that itself and tells how it ended. Each first failure is kept as a file in `folder`. Never
    tried again are tests marked `no_second_try`, files that could not be imported, and a test in
    which a worker of xdist crashed.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.folder = folder
        self.env = env
        self.passed = 0
        self.skipped = 0
        self.failed: list[dict[str, Any]] = []
        self._options: list[str] = []

    def run(self, task: Task) -> int:
        """Run a stage; return its exit code, or 0 when `close` decides about all that failed."""
        self._options = [HOSTILE] if HOSTILE in task else []
        code, outcomes = self._pytest(task)
        if outcomes is None:
            return code or TESTS_FAILED
        self.passed += outcomes["passed"]
        self.skipped += outcomes["skipped"]
        for failure in outcomes["failed"]:
            name = re.sub(r"[^\w.-]+", "-", failure["id"])[-100:]
            failure["file"] = self.folder / f"{len(self.failed) + 1}-{name}.txt"
            failure["file"].write_text(failure["text"])
            self.failed.append(failure)
        is_decided_later = task[0] != ALONE and code == TESTS_FAILED and outcomes["failed"]
        return 0 if is_decided_later else code

    def close(self) -> bool:
        """Try again what may be, print the closing lines, and return whether no test failed."""
        tried = [failure for failure in self.failed if failure["again"]]
        if len(tried) > SECOND_TRIES:
            say(f"{len(tried)} tests failed: more than {SECOND_TRIES} are not tried again")
            tried = []
        second = [failure for failure in tried if self._passes_alone(failure)]
        red = [failure for failure in self.failed if failure not in second]
        for failure in red:
            how = "twice" if failure in tried else "no second try"
            print(f"failed, {how}: {failure['id']} ({failure['file']})")
        for failure in second:
            print(f"passed alone, second try: {failure['id']} (first: {failure['file']})")
        passed = self.passed + len(second)
        print(f"{passed} passed, {len(red)} failed, {self.skipped} skipped", flush=True)
        return not red

    def _passes_alone(self, failure: dict[str, Any]) -> bool:
        if "passed_alone" in failure:
            return bool(failure["passed_alone"])
        test: str = failure["id"]
        say(f"== second try, alone: {test}")
        # In a file: nothing in a test's name then means anything to a shell.
        names = self.folder / "second_try"
        names.write_text(test + "\n")
        code, outcomes = self._pytest(("serial", *self._options, f"@{names}"))
        return code == 0 and outcomes is not None and outcomes["passed"] > 0

    def _pytest(self, task: Task) -> tuple[int, dict[str, Any] | None]:
        """Run pytest; return its exit code and what tests-support/outcomes.py wrote, if it did."""
        target = self.folder / "outcomes.json"
        target.unlink(missing_ok=True)
        code = hatch_run((*task, f"--outcomes={target}"), self.env)
        return code, json.loads(target.read_text()) if target.exists() else None


def forget_wheels() -> None:
    """Remove wheels of earlier versions, so that each distribution has one."""
    for wheel in (ROOT / "dist").glob("*.whl"):
        wheel.unlink()


def not_covered() -> list[str]:
    """Return what the pipeline cannot test on this machine."""
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = [f"Pythons other than {this}", "torch other than the pinned one"]
    missing.append(f"processors other than {os.uname().machine}")
    if not Path("/dev/nvidiactl").exists():
        missing.append("GPUs")
    missing.append("Slurm (python3 tools/dev.py slurm)")
    missing.append("what a careless shell leaves (python3 tools/dev.py test --hostile)")
    missing.append("the oldest gRPC and protobuf")
    return [*missing, "scenarios marked slow"]


def say(line: str) -> None:
    """Print a line before whatever the next task prints."""
    print(f"dev.py: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Parse the command line and run the tasks of the command."""
    if sys.version_info < OLDEST_PYTHON:
        say("Python 3.10 or newer is needed")
        return 2
    parser = argparse.ArgumentParser(
        prog="dev.py",
        description="Chores of this repository.",
        epilog="\n".join(f"  {name:12} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of that command")
    options = parser.parse_args()
    # Paths are the caller's; the tasks run at the root.
    args = [str(Path(arg).resolve()) if Path(arg).exists() else arg for arg in options.args]
    if options.command == "alone":
        args = [Path(arg).name for arg in options.args]
    if options.command == "ci":
        say("not covered here: " + ", ".join(not_covered()))
    try:
        install_hatch()
        second_try = options.command in {"test", "ci", ALONE}
        return run(tasks_of(options.command, args), second_try=second_try)
    except subprocess.CalledProcessError as error:
        say(f"could not install hatch: pip ended with exit code {error.returncode}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
