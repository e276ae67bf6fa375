# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration scenarios: a job that is closed, and leaves nothing, in the end."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))

from fault_jobs import Job

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def job() -> Iterator[Job]:
    """Give a job that has not started; at the end nothing of it may be left.

    Its folder has a short path: Unix sockets go into it.
    """
    folder = Path(tempfile.mkdtemp(prefix="nvrx-it-"))
    made = Job(folder)
    try:
        yield made
        made.assert_nothing_left()
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)
