# SPDX-License-Identifier: Apache-2.0
"""Prepare a release of one distribution: version, changelog, commit and tag; it publishes nothing.

Pushing the tag ``<dist>-v<version>`` makes the release workflow build, check and publish the wheel.
``--sbom`` writes the bill of materials (CycloneDX) of built wheels beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
import uuid
import zipfile
from email.parser import BytesParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def sbom(wheel: Path) -> dict[str, Any]:
    """Return the CycloneDX 1.6 bill of materials of a wheel, from its own metadata.

    It names the wheel with its hash, the native libraries in it with theirs, and the distributions
    that it requires, those of extras as optional. The same wheel always gives the same text.
    """
    content = wheel.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if len(members) != 1:
            raise ReleaseError(f"{wheel} is no wheel: it has {len(members)} METADATA files")
        metadata = BytesParser().parsebytes(archive.read(members[0]))
        native = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    name, version = str(metadata["Name"]), str(metadata["Version"])
    reference = f"pkg:pypi/{name}@{version}"
    required: dict[str, list[str]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        match = re.match(r"[A-Za-z0-9._-]+", line)
        if match:
            key = re.sub(r"[-_.]+", "-", match[0]).lower()
            required.setdefault(key, []).append(line)
    components: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{key}",
            "name": key,
            "purl": f"pkg:pypi/{key}",
            "scope": "optional" if all("extra ==" in line for line in lines) else "required",
            "properties": [{"name": "python:requires-dist", "value": line} for line in lines],
        }
        for key, lines in sorted(required.items())
    ]
    components += [
        {"type": "file", "bom-ref": f"file:{path}", "name": path, "hashes": [digest(data)]}
        for path, data in sorted(native.items())
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest(content)['content'])}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": reference,
                "name": name,
                "version": version,
                "description": str(metadata["Summary"]),
                "purl": f"{reference}?file_name={wheel.name}",
                "hashes": [digest(content)],
                "licenses": [{"expression": str(metadata["License-Expression"])}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": reference, "dependsOn": [item["bom-ref"] for item in components]},
            *({"ref": item["bom-ref"]} for item in components),
        ],
    }


def digest(content: bytes) -> dict[str, str]:
    """Return the SHA-256 of bytes, as CycloneDX writes a hash."""
    return {"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}


def write_sboms(wheels: Sequence[Path]) -> list[Path]:
    """Write ``<wheel>.cdx.json`` beside each wheel; return the paths."""
    written = []
    for wheel in wheels:
        try:
            text = json.dumps(sbom(wheel), indent=2)
        except (OSError, zipfile.BadZipFile) as error:
            raise ReleaseError(f"{wheel} is no wheel: {error}") from error
        path = wheel.with_name(f"{wheel.name}.cdx.json")
        path.write_text(f"{text}\n")
        written.append(path)
    return written


def main() -> int:
    """Plan, or release one distribution."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("distribution", nargs="?")
    parser.add_argument("bump", nargs="?", help="major, minor, patch, or a version x.y.z")
    parser.add_argument("--plan", action="store_true", help="say what could be released")
    parser.add_argument("--missing-fragments", metavar="BASE", help="check a branch against BASE")
    parser.add_argument("--sbom", metavar="WHEEL", nargs="+", type=Path, help="write their SBOMs")
    parser.add_argument("--ci-passed", action="store_true", help="the checks passed on this commit")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    root: Path = options.root
    try:
        if options.plan:
            print("\n".join(plan(root)))
            return 0
        if options.sbom:
            print("\n".join(map(str, write_sboms(options.sbom))))
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
