# SPDX-License-Identifier: Apache-2.0
"""The public names of nvrx-straggler are those that this package has recorded."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

DISTRIBUTION = "nvrx-straggler"
ROOT = Path(__file__).parents[3]
RECORD = Path(__file__).with_name("public_api.txt")
MODULES = [line for line in RECORD.read_text().splitlines() if line and line[0] != " "]


def test_record_is_current() -> None:
    """Exported names and signatures equal the record, so a change of them is seen in review."""
    tool = ROOT / "tools" / "check_api.py"
    if not tool.exists():
        pytest.skip("tools/check_api.py is in the repository only")
    result = subprocess.run(
        [sys.executable, str(tool), DISTRIBUTION],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", MODULES)
def test_module_has_what_it_exports(name: str) -> None:
    """Every public module imports, and every name in its `__all__` is there."""
    module = importlib.import_module(name)
    missing = [item for item in getattr(module, "__all__", ()) if not hasattr(module, item)]
    assert not missing
