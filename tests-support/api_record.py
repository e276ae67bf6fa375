# SPDX-License-Identifier: Apache-2.0
"""The tests of a distribution's record of its public names, `tests/public_api.txt`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_TOOL = Path(__file__).parents[1] / "tools" / "check_api.py"


def check_of(distribution: str) -> Callable[[], None]:
    """Return a test that exported names and signatures equal the record."""

    def check() -> None:
        """Exported names and signatures equal the record, so a change of them is seen in review."""
        result = subprocess.run(
            [sys.executable, str(_TOOL), distribution],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr

    return check


def import_of(record: Path) -> Callable[[str], None]:
    """Return a test that each recorded module has what it exports."""
    modules = [line for line in record.read_text().splitlines() if line and line[0] != " "]

    @pytest.mark.parametrize("name", modules)
    def check(name: str) -> None:
        """Every public module imports, and every name in its `__all__` is there."""
        module = importlib.import_module(name)
        missing = [item for item in getattr(module, "__all__", ()) if not hasattr(module, item)]
        assert not missing

    return check
