# SPDX-License-Identifier: Apache-2.0
"""Test each wheel alone: only it and the nvrx wheels it requires, in a fresh environment.

Third-party packages come from the interpreter that runs this, through one ``.pth`` file: a ``.pth``
in a folder added by another one is not read, so the editable checkouts do not leak in. Tests marked
serial or slow are left to the ordinary run. A few tests that fail are run once more, as there.
"""

from __future__ import annotations

import argparse
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

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "nvrx-"
TIMEOUT_S = 300.0
TESTS_FAILED = 1  # exit codes of pytest
NO_TESTS_COLLECTED = 5
SECOND_TRIES = 3  # more failures in one distribution are no race

SHOW_ORIGIN = """
import importlib.metadata, sys, nvidia_resiliency_ext as package
name = sys.argv[1]
print(len(package.__path__), package.__path__[0], importlib.metadata.version(name))
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


def test_alone(root: Path, distribution: str, wheels: dict[str, Path], workers: str) -> str | None:
    """Install and test one distribution; return what went wrong, or None."""
    with tempfile.TemporaryDirectory(prefix="nvrx-alone-") as name:
        folder = Path(name)
        environment = folder / "venv"
        venv.EnvBuilder(symlinks=True).create(environment)
        python = environment / "bin" / "python"
        names = closure(distribution, wheels)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        install = ["--python", str(python), "install", "--no-deps", "--no-index"]
        subprocess.run([*pip, *install, *(str(wheels[item]) for item in names)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        (packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
        empty = folder / "empty"
        empty.mkdir()
        settings = folder / "pytest.ini"
        pytest_settings(root, distribution, settings)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
        env.pop("VIRTUAL_ENV", None)
        env["PATH"] = os.pathsep.join((str(python.parent), env.get("PATH", os.defpath)))
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
        command += [str(tests), "-p", "no:cacheprovider", "-p", "outcomes"]
        command += [f"--outcomes={outcomes}", "-m", "not serial and not slow"]

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
    parser.add_argument("distributions", nargs="*", help="default: every one that has a wheel")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    wheels = wheels_in(options.wheels)
    names = options.distributions or sorted(wheels)
    if not names:
        parser.error(f"no wheels in {options.wheels}")
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
    print(f"alone: {len(names) - len(failed)} of {len(names)} wheels work alone")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
