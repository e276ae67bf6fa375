# SPDX-License-Identifier: Apache-2.0
"""A folder for Unix sockets: `tmp_path` may be too long, for the address of one has 107 bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Give a new folder with a short path, wherever TMPDIR is."""
    with tempfile.TemporaryDirectory(prefix="nvrx-", dir="/tmp") as name:
        yield Path(name)
