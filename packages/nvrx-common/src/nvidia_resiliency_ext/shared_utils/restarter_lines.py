# SPDX-License-Identifier: Apache-2.0
"""The `[NestedRestarter]` lines by which log-based tools follow restarts; it logs nothing itself.

Both layers of restart write them: the launcher as `InJob`, the wrapper in a rank as `InProcess`.
"""

from __future__ import annotations

import enum

__all__ = ["IN_JOB", "IN_PROCESS", "RestarterStage", "RestarterState", "format_restarter_line"]

IN_JOB = "InJob"  # the layer that restarts processes
IN_PROCESS = "InProcess"  # the layer that restarts inside a process


class RestarterState(enum.Enum):
    """Where a layer of restart is."""

    INITIALIZE = "initialize"
    HANDLING = "handling"
    FINALIZED = "finalized"
    ABORTED = "aborted"


class RestarterStage(enum.Enum):
    """How far the handling of one fault is."""

    STARTING = "starting"
    PROCESSING = "processing"
    COMPLETED = "completed"


def format_restarter_line(
    name: str, state: RestarterState | str, stage: RestarterStage | str | None = None
) -> str:
    """Return the line for one change of state.

    Args:
        name: The layer, `IN_JOB` or `IN_PROCESS`, or a name of the user's own.
        state: The state entered, as a member or as its text.
        stage: The stage of the state; none is written for `None`.

    Example:
        >>> format_restarter_line(IN_JOB, RestarterState.HANDLING, RestarterStage.STARTING)
        '[NestedRestarter] name=[InJob] state=handling stage=starting'
    """
    state_text = state.value if isinstance(state, RestarterState) else state
    line = f"[NestedRestarter] name=[{name}] state={state_text}"
    if stage is None:
        return line
    return f"{line} stage={stage.value if isinstance(stage, RestarterStage) else stage}"
