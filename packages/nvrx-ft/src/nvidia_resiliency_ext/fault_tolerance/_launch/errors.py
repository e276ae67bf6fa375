# SPDX-License-Identifier: Apache-2.0
"""The launcher's public exceptions; what they mean for the job is decided elsewhere."""

from __future__ import annotations


class UnhealthyNodeException(Exception):  # noqa: N818  # the name is public
    """A node failed its health check and leaves the job."""

    def __init__(self, message: str = "A node in the cluster is unhealthy") -> None:
        super().__init__(message)


class TerminalWorkerGroupFailure(Exception):  # noqa: N818  # the name is public
    """The workers failed and there is no restart left."""


class NoRestartRequested(Exception):  # noqa: N818  # the name is public
    """The job must not be restarted and not be queued again.

    Attributes:
        reason: Why, such as `no_progress`.
    """

    def __init__(self, reason: str, message: str | None = None) -> None:
        super().__init__(message or f"no restart was requested: {reason}")
        self.reason = reason
