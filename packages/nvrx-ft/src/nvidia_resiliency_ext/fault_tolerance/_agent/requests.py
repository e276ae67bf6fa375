# SPDX-License-Identifier: Apache-2.0
"""What ranks ask of the launcher: mailbox messages turned into the launcher's events. Pure."""

from __future__ import annotations

import logging

from nvidia_resiliency_ext.fault_tolerance._core.machine import Request, RequestReceived
from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction, WorkloadControlRequest

logger = logging.getLogger("nvrx")

_REQUESTS = {
    WorkloadAction.ExcludeThisNode: Request.EXCLUDE_NODE,
    WorkloadAction.ShutdownWorkload: Request.SHUTDOWN,
}


def request_event(message: object) -> RequestReceived | None:
    """Return the event of a `(global rank, WorkloadControlRequest)`, or None for nothing to do."""
    if not (isinstance(message, (tuple, list)) and len(message) == 2):  # noqa: PLR2004  # a pair
        logger.warning("a rank sent a message that is no request: %.200r", message)
        return None
    rank, request = message
    if not isinstance(request, WorkloadControlRequest):
        logger.warning("rank %s sent a message that is no request: %.200r", rank, request)
        return None
    logger.info("rank %s asks: %s (%s)", rank, request.action.name, request.description)
    kind = _REQUESTS.get(request.action)
    if kind is None:
        return None
    return RequestReceived(kind, f"rank {rank}: {request.description}")
