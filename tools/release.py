# SPDX-License-Identifier: Apache-2.0
"""Prepare a release of one distribution: version, changelog, commit and tag; it publishes nothing.

Pushing the tag ``<dist>-v<version>`` makes the release workflow build, check and publish the wheel.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = "nvrx-common"
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")


class ReleaseError(Exception):
    """Why a release cannot be made now."""


def output(root: Path, *command: str) -> str:
    """Return what a command prints; a failure of it ends the release."""
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if result.returncode:
        text = (result.stdout + result.stderr).strip()
        raise ReleaseError(f"{' '.join(command)} ended with {result.returncode}:\n{text}")
    return result.stdout.strip()


def fragments(root: Path, distribution: str) -> list[str]:
    """Return the names of a distribution's changelog fragments."""
    folder = root / "packages" / distribution / "changelog.d"
    return sorted(path.name for path in folder.glob("*.md") if path.stem.split(".")[-1] in KINDS)


def distributions(root: Path) -> list[str]:
    """Return all distributions."""
    return sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml"))


def plan(root: Path) -> list[str]:
    """Return one line for each distribution that has something to release."""
    lines = []
    common_first = bool(fragments(root, COMMON))
    for name in distributions(root):
        found = fragments(root, name)
        if found:
            after = f", after {COMMON}" if common_first and name != COMMON else ""
            lines.append(f"{name}: {len(found)} unreleased changes{after}")
    return lines or ["nothing to release"]


def missing_fragments(root: Path, base: str) -> list[str]:
    """Return the distributions whose ``src/`` changed since the base without a new fragment."""
    changed = output(root, "git", "diff", "--name-only", f"{base}...HEAD").splitlines()
    missing = []
    for name in distributions(root):
        folder = f"packages/{name}/"
        has_source = any(path.startswith(f"{folder}src/") for path in changed)
        has_fragment = any(path.startswith(f"{folder}changelog.d/") for path in changed)
        if has_source and not has_fragment:
            missing.append(name)
    return missing


def version_of(root: Path, distribution: str) -> str:
    """Return the version that the sources declare."""
    return output(root / "packages" / distribution, "hatch", "version").splitlines()[-1]


def release(root: Path, distribution: str, bump: str, *, ci_passed: bool) -> str:
    """Make the release commit and its tag, and return the tag."""
    if distribution not in distributions(root):
        raise ReleaseError(f"no distribution {distribution}; there are {distributions(root)}")
    if output(root, "git", "status", "--porcelain"):
        raise ReleaseError("the working tree has changes; commit them first")
    if not fragments(root, distribution):
        raise ReleaseError(f"{distribution} has no changelog fragment: nothing to release")
    if distribution != COMMON and fragments(root, COMMON):
        print(f"note: {COMMON} has unreleased changes; release it first if they are needed")
    if not ci_passed:
        code = subprocess.run([sys.executable, "tools/dev.py", "ci"], cwd=root, check=False)
        if code.returncode:
            raise ReleaseError("the checks fail")
    folder = root / "packages" / distribution
    if bump != version_of(root, distribution):
        output(folder, "hatch", "version", bump)
    version = version_of(root, distribution)
    tag = f"{distribution}-v{version}"
    if output(root, "git", "tag", "--list", tag):
        raise ReleaseError(f"{tag} exists already")
    output(
        root, "towncrier", "build", "--yes", "--config", "towncrier.toml",
        "--dir", str(folder), "--name", distribution, "--version", version,
    )  # fmt: skip
    output(root, "git", "add", "--all", "--", str(folder))
    output(root, "git", "commit", "-m", f"Release {distribution} {version}")
    output(root, "git", "tag", "-a", tag, "-m", f"{distribution} {version}")
    return tag


def main() -> int:
    """Plan, or release one distribution."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("distribution", nargs="?")
    parser.add_argument("bump", nargs="?", help="major, minor, patch, or a version x.y.z")
    parser.add_argument("--plan", action="store_true", help="say what could be released")
    parser.add_argument("--missing-fragments", metavar="BASE", help="check a branch against BASE")
    parser.add_argument("--ci-passed", action="store_true", help="the checks passed on this commit")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    root: Path = options.root
    try:
        if options.plan:
            print("\n".join(plan(root)))
            return 0
        if options.missing_fragments:
            missing = missing_fragments(root, options.missing_fragments)
            for name in missing:
                print(f"{name}: src/ changed; add packages/{name}/changelog.d/+slug.<kind>.md")
            return 1 if missing else 0
        if not options.distribution or not re.fullmatch(
            r"major|minor|patch|\d+\.\d+\.\d+", options.bump or ""
        ):
            parser.error("give a distribution and major, minor, patch or a version x.y.z")
        tag = release(root, options.distribution, options.bump, ci_passed=options.ci_passed)
        print(f"made {tag}; publish with: git push origin HEAD {tag}")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
