# SPDX-License-Identifier: Apache-2.0
"""Builds the fake libcupti and steers it from Python."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[1] / "native"
SOURCES = Path(__file__).resolve().parents[2] / "cpp"


def build(target: Path, *flags: str, sources: tuple[Path, ...] = ()) -> Path:
    """Compile C++ files; skip the test where there is no compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    chosen = sources or (NATIVE / "fake_cupti.cpp",)
    command = [compiler, "-std=c++17", "-O1", "-g", "-fPIC", "-pthread", *flags]
    command += [*map(str, chosen), "-o", str(target), "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return target


def load(path: Path) -> ctypes.CDLL:
    """Return the library with the types of what tests call."""
    library = ctypes.CDLL(str(path))
    library.fake_error.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.fake_run.argtypes = [ctypes.c_int] * 3 + [ctypes.c_int64] * 2
    library.fake_rename.argtypes = [ctypes.c_int, ctypes.c_char_p]
    library.fake_cost_ns.argtypes = [ctypes.c_int, ctypes.c_int]
    library.fake_cost_ns.restype = ctypes.c_double
    return library
