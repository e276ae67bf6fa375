# SPDX-License-Identifier: Apache-2.0
"""The lines by which log-based tools follow restarts."""

import pytest

from nvidia_resiliency_ext.shared_utils.restarter_lines import (
    IN_JOB,
    IN_PROCESS,
    RestarterStage,
    RestarterState,
    format_restarter_line,
)


@pytest.mark.parametrize(
    ("name", "state", "stage", "line"),
    [
        (IN_JOB, RestarterState.INITIALIZE, None, "name=[InJob] state=initialize"),
        (
            IN_JOB,
            RestarterState.HANDLING,
            RestarterStage.STARTING,
            "name=[InJob] state=handling stage=starting",
        ),
        (IN_PROCESS, "handling", "processing", "name=[InProcess] state=handling stage=processing"),
        (
            IN_JOB,
            RestarterState.HANDLING,
            RestarterStage.COMPLETED,
            "name=[InJob] state=handling stage=completed",
        ),
        (IN_JOB, RestarterState.FINALIZED, None, "name=[InJob] state=finalized"),
        (IN_PROCESS, RestarterState.ABORTED, None, "name=[InProcess] state=aborted"),
    ],
)
def test_line(
    name: str, state: RestarterState | str, stage: RestarterStage | str | None, line: str
) -> None:
    """Each state and stage gives the exact text that tools look for."""
    assert format_restarter_line(name, state, stage) == f"[NestedRestarter] {line}"
