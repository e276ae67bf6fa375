# SPDX-License-Identifier: Apache-2.0
"""One command for each chore; it owns the order of tasks, hatch.toml owns what each task runs.

The first run makes a private hatch in ``.hatch/`` and the environment ``.venv/``. Nothing is
written outside the checkout, and it works from any folder. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HATCH_FOLDER = ROOT / ".hatch"
HATCH = HATCH_FOLDER / "bin" / "hatch"
HATCH_REQUIREMENT = "hatch>=1.18,<2"
OLDEST_PYTHON = (3, 10)
NO_TESTS_COLLECTED = 5  # pytest's exit code

BOUNDED = "not gpu and not slurm and not slow"

Task = tuple[str, ...]

COMMANDS = {
    "demo": "the main job: a job with faults that recovers (under 60 s)",
    "test": "tests of all packages, then the integration scenarios; or only the given paths",
    "integration": "the integration scenarios; arguments go to pytest",
    "check": "lint, boundaries, types and generated files: what needs no test run",
    "alone": "build every wheel and test each one alone, or only the named distributions",
    "docs": "build the documentation and run its code blocks",
    "fix": "format the code and fix what the linter can fix",
    "proto": "generate the protobuf modules again",
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
        ],
        "proto": [("proto:write",)],
        "docs": [("docs",), ("examples",)],
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
    paths = args or [str(ROOT / "packages")]
    tasks: list[Task] = [
        ("test", "-m", "not serial", *paths),
        ("serial", "-m", "serial", *paths),
    ]
    if not args:
        tasks.append(("scenarios", "-m", BOUNDED, str(ROOT / "tests-integration")))
    return tasks


def environment() -> dict[str, str]:
    """Return the environment of hatch: all that it keeps lies in the checkout."""
    env = dict(os.environ)
    for name in ("PYTHONHOME", "VIRTUAL_ENV", "HATCH_ENV", "HATCH_ENV_ACTIVE"):
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


def run(tasks: list[Task]) -> int:
    """Run the tasks in turn, all of them, and return the first failure's exit code."""
    env = environment()
    if any(":" not in task[0] for task in tasks):
        create = [str(HATCH), "-q", "env", "create"]
        if subprocess.run(create, cwd=ROOT, env=env, check=False).returncode:
            say("the environment could not be made")
            return 1
    failures: list[tuple[str, int]] = []
    for task in tasks:
        started = time.monotonic()
        if task[0] == "alone":
            forget_wheels()
        say("== " + " ".join(arg.removeprefix(f"{ROOT}/") for arg in task))
        code = subprocess.run([str(HATCH), "run", *task], cwd=ROOT, env=env, check=False).returncode
        if task[0] in {"serial", "scenarios", "integration"} and code == NO_TESTS_COLLECTED:
            code = 0
        if code:
            failures.append((task[0], code))
        if len(tasks) > 1 and task is not tasks[-1]:
            say(f"== {task[0]}: exit code {code}, {time.monotonic() - started:.0f} s")
    if failures:
        say("failed: " + ", ".join(f"{name} ({code})" for name, code in failures))
        return failures[0][1]
    return 0


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
        return run(tasks_of(options.command, args))
    except subprocess.CalledProcessError as error:
        say(f"could not install hatch: pip ended with exit code {error.returncode}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
