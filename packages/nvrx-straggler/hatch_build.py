# SPDX-License-Identifier: Apache-2.0
"""Compiles the extension `nvrx_cupti_module` when the package is built or installed editable."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SKIP = "STRAGGLER_DET_SKIP_CUPTI_EXT_BUILD"
NAME = "nvrx_cupti_module.abi3.so"
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-static-libstdc++", "-static-libgcc", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-cast-function-type", "-Wno-missing-field-initializers"),
    "-DPy_LIMITED_API=0x030A0000",
)


def compile_extension(root: Path, target: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile `root/cpp` into `target`, unless that is newer than all sources.

    Raises:
        RuntimeError: The compiler is missing or fails; one line that says how to go without.
    """
    sources = sorted((root / "cpp").glob("*.cpp"))
    inputs = [*sources, *(root / "cpp").glob("*.h"), Path(__file__)]
    if target.exists() and target.stat().st_mtime > max(p.stat().st_mtime for p in inputs):
        return
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    include = f"-I{sysconfig.get_path('include')}"
    command = [*compiler, *FLAGS, *extra, include, *map(str, sources), "-o", str(unfinished)]
    try:
        result = subprocess.run(
            [*command, "-ldl"], capture_output=True, text=True, check=False, timeout=600
        )
        problem = ""
        if result.returncode != 0:
            problem = result.stderr or f"{compiler[0]} ended with status {result.returncode}"
    except OSError as error:
        problem = str(error)
    if problem:
        unfinished.unlink(missing_ok=True)
        sys.stderr.write(problem + "\n")
        raise RuntimeError(
            f"nvrx-straggler: {compiler[0]} could not compile its extension; set {SKIP}=1 to"
            " install without GPU kernel timing"
        )
    unfinished.replace(target)


class CuptiExtensionHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the extension to wheels and editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say that the wheel fits one platform and Python 3.10 or later."""
        if os.environ.get(SKIP, "").strip().lower() in {"1", "on", "yes", "true"}:
            return
        root = Path(self.root)
        target = root / "src" / NAME
        compile_extension(root, target)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        if version != "editable":
            build_data["force_include"][str(target)] = NAME
