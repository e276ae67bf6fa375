# SPDX-License-Identifier: Apache-2.0
"""Test each wheel alone: only it and the nvrx wheels it requires, in a fresh environment.

Then all together in one environment: no file belongs to two wheels, every public module can be
imported, every program prints its help, and the examples of the packages' READMEs run.

Third-party packages come from the interpreter that runs this, through one ``.pth`` file: a ``.pth``
in a folder added by another one is not read, so the editable checkouts do not leak in. Tests marked
serial or slow, and all but the first values of a parametrized test, are left to the ordinary run. A
few tests that fail are run once more, as there.
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
from typing import TYPE_CHECKING

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


def test_alone(root: Path, distribution: str, wheels: dict[str, Path], workers: str) -> str | None:
    """Install and test one distribution; return what went wrong, or None."""
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

        def run(*args: str) -> int:
            return subprocess.run(
                [*command, *args], cwd=empty, env=env, timeout=TIMEOUT_S, check=False
            ).returncode

        try:
            code = run("-n", workers, str(tests))
            again = tried_again(outcomes) if code == TESTS_FAILED else []
            if again:
                print(f"alone: {distribution}: second try of {', '.join(again)}", flush=True)
                code = run("-p", "no:xdist", *(f"{tests}/{test}" for test in again))
        except subprocess.TimeoutExpired:
            return f"tests did not end within {TIMEOUT_S:.0f} s"
        if code == NO_TESTS_COLLECTED:
            return "has no test that runs alone"
        return f"tests failed (pytest's exit code {code})" if code else None


def tried_again(outcomes: Path) -> list[str]:
    """Return the tests that a race may have made fail; none if one of all must not be repeated."""
    if not outcomes.exists():
        return []
    failed = json.loads(outcomes.read_text())["failed"]
    may = len(failed) <= SECOND_TRIES and all(failure["again"] for failure in failed)
    return [failure["id"] for failure in failed] if may else []


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
    options = parser.parse_args()
    wheels = wheels_in(options.wheels)
    if not wheels:
        parser.error(f"no wheels in {options.wheels}")
    wanted = options.distributions or [*sorted(wheels), TOGETHER]
    names = [name for name in wanted if name != TOGETHER]
    failed = []
    for name in names:
        started = time.monotonic()
        problem = test_alone(
            options.root.resolve(), name, wheels, os.environ.get("NVRX_TEST_WORKERS", "4")
        )
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
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
