# SPDX-License-Identifier: Apache-2.0
"""Generate the protobuf modules from the `.proto` files, or say which are not as generated.

The generated files are checked in, so that a build needs no compiler. Run it in the environment
`proto`, whose compiler is pinned: code of later ones refuses the protobuf of training containers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = ("grpcio-tools", "1.62.3")
HEADER = "# SPDX-License-Identifier: Apache-2.0\n"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def sources(root: Path) -> list[Path]:
    """Return the `.proto` files of all packages, relative to the root."""
    found = (path.relative_to(root) for path in root.glob("packages/*/src/**/*.proto"))
    return sorted(found)


def generate(root: Path) -> dict[Path, str]:
    """Return what the compiler makes of each source, by path relative to the root."""
    made = {}
    for source in sources(root):
        # The path below `src` becomes the module's name in the generated imports.
        package = Path(*source.parts[: source.parts.index("src") + 1])
        with tempfile.TemporaryDirectory(prefix="nvrx-proto-") as out:
            outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
            compiler = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root / package}"]
            subprocess.run([*compiler, *outputs, str(root / source)], check=True)
            for path in sorted(Path(out).rglob("*_pb2*")):
                made[package / path.relative_to(out)] = HEADER + path.read_text()
    return made


def checked_in(root: Path) -> dict[Path, str]:
    """Return the generated files that lie beside the sources."""
    folders = {source.parent for source in sources(root)}
    paths = (path for folder in folders for path in (root / folder).iterdir())
    return {p.relative_to(root): p.read_text() for p in paths if p.name.endswith(SUFFIXES)}


def installed(name: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    """Write the generated files, or with `--check` name those that differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    root: Path = options.root.resolve()
    name, version = COMPILER
    if installed(name) != version:
        print(
            f"gen_proto: needs {name} {version}; run: python3 tools/dev.py proto", file=sys.stderr
        )
        return 2
    made, present = generate(root), checked_in(root)
    different = sorted(p for p in made.keys() | present.keys() if made.get(p) != present.get(p))
    for path in different:
        print(f"{'differs' if options.check else 'written'}: {path}")
        if options.check:
            continue
        if path in made:
            (root / path).write_text(made[path])
        else:
            (root / path).unlink()
    if options.check and different:
        print("Run: python3 tools/dev.py proto")
    return 1 if options.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
