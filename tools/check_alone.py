# SPDX-License-Identifier: Apache-2.0
"""Test each wheel alone: only it and the nvrx wheels it requires, in a fresh environment.

Then all together in one environment: no file belongs to two wheels, every public module can be
imported, every program prints its help, and the examples of the packages' READMEs run.

Third-party packages come from the interpreter that runs this, through one ``.pth`` file: a ``.pth``
in a folder added by another one is not read, so the editable checkouts do not leak in. Tests marked
serial or slow, and all but the first values of a parametrized test, are left to the ordinary run. A
few tests that fail are run once more, as there; ``--outcomes FILE`` tells ``tools/dev.py`` of both
tries.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "nvrx-"
PROGRAM = re.compile("nvrx-|ft_launcher")
TOGETHER = "together"
TIMEOUT_S = 300.0
TESTS_FAILED = 1  # exit codes of pytest
NO_TESTS_COLLECTED = 5
SECOND_TRIES = 3  # more failures in one distribution are no race

SHOW_ORIGIN = """
import importlib.metadata, sys, nvidia_resiliency_ext as package
name = sys.argv[1]
print(len(package.__path__), package.__path__[0], importlib.metadata.version(name))
"""


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    if not (module.__file__ or "").startswith(sys.argv[1]):
        sys.exit(f"{name} comes from {module.__file__}")
    for public in getattr(module, "__all__", ()):
        getattr(module, public)
"""


def wheels_in(folder: Path) -> dict[str, Path]:
    """Return the wheel of each of our distributions; two of one distribution are an error."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.whl")):
        name = path.name.split("-")[0].replace("_", "-").lower()
        if name in found:
            raise SystemExit(f"{folder} has two wheels of {name}: empty it and build again")
        found[name] = path
    return found


def requirements(wheel: Path) -> set[str]:
    """Return which of our distributions a wheel requires without any extra."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(member).decode())
    names = set()
    for line in metadata.get_all("Requires-Dist", []):
        match = re.match(r"[A-Za-z0-9._-]+", line)
        if match and "extra ==" not in line:
            names.add(re.sub(r"[-_.]+", "-", match[0]).lower())
    return {name for name in names if name.startswith(PREFIX)}


def closure(name: str, wheels: dict[str, Path]) -> list[str]:
    """Return the distribution and all of ours that it needs."""
    needed: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in needed:
            continue
        if current not in wheels:
            raise SystemExit(f"{name} needs {current}, whose wheel was not built")
        needed.append(current)
        waiting += sorted(requirements(wheels[current]))
    return needed


def pytest_settings(root: Path, distribution: str, target: Path) -> None:
    """Write the repository's pytest settings for one distribution, without the others' helpers."""
    shared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]
    helpers = root / "packages" / distribution / "tests" / "helpers"
    support = ROOT / "tests-support"
    lines = [
        "[pytest]",
        "addopts = --import-mode=importlib --tb=short -q",
        f"pythonpath = {helpers} {support}",
    ]
    lines += [f"timeout = {shared['timeout']}", "tmp_path_retention_policy = failed"]
    for key in ("markers", "filterwarnings"):
        lines += [f"{key} =", *(f"    {item}" for item in shared[key])]
    target.write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def environment_with(wheels: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Give a fresh environment with some wheels, and the folder of its packages, for a while."""
    with tempfile.TemporaryDirectory(prefix="nvrx-alone-") as name:
        environment = Path(name) / "venv"
        venv.EnvBuilder(symlinks=True).create(environment)
        python = environment / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        install = ["--python", str(python), "install", "--no-deps", "--no-index"]
        subprocess.run([*pip, *install, *(str(wheel) for wheel in wheels)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        (packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
        yield python, packages


def clean_environ(python: Path) -> dict[str, str]:
    """Return our environment without settings of Python and pytest, and with it first on PATH."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    env.pop("VIRTUAL_ENV", None)
    env["PATH"] = os.pathsep.join((str(python.parent), env.get("PATH", os.defpath)))
    return env


def public_modules(wheel: Path) -> list[str]:
    """Return the modules of a wheel that users may import."""
    with zipfile.ZipFile(wheel) as archive:
        files = [Path(name) for name in archive.namelist() if name.endswith(".py")]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    return sorted(name for name in names if "._" not in name and "_pb2" not in name)


def owned_twice(wheels: Iterable[Path]) -> list[str]:
    """Return the files that two wheels install: pip would let the last one win."""
    owners: dict[str, list[str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".dist-info/" not in name:
                    owners.setdefault(name, []).append(wheel.name)
    return [f"{name} is in {' and '.join(own)}" for name, own in owners.items() if len(own) > 1]


def test_together(root: Path, wheels: dict[str, Path]) -> str | None:
    """Install all wheels into one environment and use them; return what went wrong, or None."""
    if found := owned_twice(wheels.values()):
        return "; ".join(found)
    with environment_with(wheels.values()) as (python, packages):
        empty = packages.parent
        env = clean_environ(python)
        modules = [name for wheel in wheels.values() for name in public_modules(wheel)]
        readmes = sorted(root.glob("packages/*/README.md"))
        commands = [[str(python), "-c", IMPORT_ALL, str(packages), *modules]]
        programs = sorted(path for path in python.parent.iterdir() if PROGRAM.match(path.name))
        commands += [[str(program), "--help"] for program in programs]
        commands += [[str(python), str(root / "tools" / "check_docs.py"), *map(str, readmes)]]
        for command in commands:
            try:
                done = subprocess.run(
                    command, cwd=empty, env=env, capture_output=True, text=True,
                    timeout=TIMEOUT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"{Path(command[0]).name} {command[1]} did not end within {TIMEOUT_S:.0f} s"
            if done.returncode:
                said = (done.stdout + done.stderr).strip()
                return f"{Path(command[0]).name} {command[1]} ended with {done.returncode}: {said}"
    return None


def test_alone(
    root: Path, distribution: str, wheels: dict[str, Path], workers: str, total: dict[str, Any]
) -> str | None:
    """Install and test one distribution; return what went wrong, or None.

    `total` holds the outcomes of all distributions, as tests-support/outcomes.py writes them.
    """
    names = closure(distribution, wheels)
    with environment_with(wheels[item] for item in names) as (python, packages):
        folder = packages.parents[3]
        empty = folder / "empty"
        empty.mkdir()
        settings = folder / "pytest.ini"
        pytest_settings(root, distribution, settings)
        env = clean_environ(python)
        safe_path = ["-P"] if sys.version_info >= (3, 11) else []
        origin = subprocess.run(
            [python, *safe_path, "-c", SHOW_ORIGIN, distribution],
            cwd=empty, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if not origin.stdout.startswith(f"1 {packages}/"):
            return f"does not import from its own wheel: {origin.stdout}{origin.stderr}".strip()
        tests = root / "packages" / distribution / "tests"
        outcomes = folder / "outcomes.json"
        command = [str(python), *safe_path, "-m", "pytest", "-c", str(settings), "--rootdir"]
        command += [str(tests), "-p", "no:cacheprovider", "-p", "outcomes", "-p", "first_cases"]
        command += [f"--outcomes={outcomes}", "--first-cases", "-m", "not serial and not slow"]

        def run(*args: str) -> tuple[int, dict[str, Any]]:
            outcomes.unlink(missing_ok=True)
            code = subprocess.run(
                [*command, *args], cwd=empty, env=env, timeout=TIMEOUT_S, check=False
            ).returncode
            return code, json.loads(outcomes.read_text()) if outcomes.exists() else no_outcomes()

        def passes_alone(test: str) -> bool:
            print(f"alone: {distribution}: second try of {test}", flush=True)
            try:
                code, found = run("-p", "no:xdist", f"{tests}/{test}")
            except subprocess.TimeoutExpired:
                return False
            return code == 0 and found["passed"] > 0

        try:
            code, found = run("-n", workers, "--durations=10", str(tests))
        except subprocess.TimeoutExpired:
            return f"tests did not end within {TIMEOUT_S:.0f} s"
        if code == NO_TESTS_COLLECTED:
            return "has no test that runs alone"
        try_again(found["failed"], passes_alone)
        add(total, found, distribution)
        passed = found["failed"] and all(failure["passed_alone"] for failure in found["failed"])
        if code == 0 or (code == TESTS_FAILED and passed):
            return None
        return f"tests failed (pytest's exit code {code})"


def no_outcomes() -> dict[str, Any]:
    """Return what tests-support/outcomes.py writes of no test; a run that is cut short has none."""
    return {"passed": 0, "skipped": 0, "failed": []}


def try_again(failed: list[dict[str, Any]], passes_alone: Callable[[str], bool]) -> None:
    """Run once more what a race may have made fail, and note in each failure how that ended."""
    tried = [failure for failure in failed if failure["again"]]
    for failure in failed:
        failure["again"] = failure in tried and len(tried) <= SECOND_TRIES
        failure["passed_alone"] = failure["again"] and passes_alone(failure["id"])


def add(total: dict[str, Any], found: dict[str, Any], distribution: str) -> None:
    """Add the outcomes of a distribution to those of all, with names that say where they are."""
    total["passed"] += found["passed"]
    total["skipped"] += found["skipped"]
    for failure in found["failed"]:
        name = f"alone: packages/{distribution}/tests/{failure['id']}"
        total["failed"].append({**failure, "id": name})


def main() -> int:
    """Test all distributions whose wheels are in the folder, or the named ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", type=Path, help="folder with the built wheels")
    parser.add_argument(
        "distributions",
        nargs="*",
        help=f"or the word {TOGETHER}; default: every one that has a wheel, and {TOGETHER}",
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--outcomes", type=Path, help="write which tests failed, and how, as JSON")
    options = parser.parse_args()
    wheels = wheels_in(options.wheels)
    if not wheels:
        parser.error(f"no wheels in {options.wheels}")
    wanted = options.distributions or [*sorted(wheels), TOGETHER]
    names = [name for name in wanted if name != TOGETHER]
    failed = []
    total = no_outcomes()
    for name in names:
        started = time.monotonic()
        workers = os.environ.get("NVRX_TEST_WORKERS", "4")
        problem = test_alone(options.root.resolve(), name, wheels, workers, total)
        result = problem or "ok"
        print(f"alone: {name}: {result} ({time.monotonic() - started:.1f} s)", flush=True)
        if problem is not None:
            failed.append(name)
    if names:
        print(f"alone: {len(names) - len(failed)} of {len(names)} wheels work alone")
    if TOGETHER in wanted:
        started = time.monotonic()
        problem = test_together(options.root.resolve(), wheels)
        seconds = time.monotonic() - started
        print(f"{TOGETHER}: {problem or 'all wheels work together'} ({seconds:.1f} s)", flush=True)
        failed += [TOGETHER] if problem else []
    if options.outcomes is not None:
        options.outcomes.write_text(json.dumps(total))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
