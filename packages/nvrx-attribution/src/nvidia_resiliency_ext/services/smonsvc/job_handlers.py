# SPDX-License-Identifier: Apache-2.0
"""What is said to the attribution service about one job, and what comes back."""

from __future__ import annotations

import http.client
import logging
import threading
import time

from nvidia_resiliency_ext.attribution.orchestration.client_response import (
    AttrSvcResult,
    parse_attrsvc_response,
)
from nvidia_resiliency_ext.services.smonsvc.models import MonitoredJob
from nvidia_resiliency_ext.shared_utils.attribution_wire import (
    ROUTE_HEALTHZ,
    ROUTE_LOGS,
    LogQuery,
    LogSubmission,
)
from nvidia_resiliency_ext.shared_utils.console import plain
from nvidia_resiliency_ext.shared_utils.json_http import JsonConnection

__all__ = ["ServiceClient", "fetch_results", "log_attribution_result", "submit_log"]

logger = logging.getLogger("nvrx")

_UNAUTHORIZED = 401
_NOT_FOUND = 404
_TOO_MANY = 429
_SERVER_ERROR = 500
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class ServiceClient:
    """Makes requests one after the other, not more often than every `gap_s`.

    Args:
        connection: Where the service is.
        ended: Set when the program ends: no request waits then.
        gap_s: Least seconds between two requests. Default 0.25.

    Attributes:
        is_reachable: Whether the last request was answered.
        is_refused: Whether it had no reply, or one that may change: 401, 429 or a failure.

    Example:
        >>> from nvidia_resiliency_ext.shared_utils.json_http import parse_endpoint
        >>> connection = JsonConnection(parse_endpoint("http://attrsvc:8000"), timeout_s=60.0)
        >>> client = ServiceClient(connection, threading.Event())
        >>> client.is_alive()  # doctest: +SKIP
        True
    """

    def __init__(
        self, connection: JsonConnection, ended: threading.Event, gap_s: float = 0.25
    ) -> None:
        self._connection = connection
        self._ended = ended
        self._gap_s = gap_s
        self._pause_s = 0.0
        self._next_s = 0.0
        self.is_reachable = True
        self.is_refused = False

    def is_alive(self) -> bool:
        """Return whether the service answers at all."""
        self._request(None)
        return self.is_reachable

    def post(self, submission: LogSubmission) -> tuple[int, object]:
        """Submit a log.

        Args:
            submission: The log and its job.

        Returns:
            Status and decoded reply; status 0 if no reply came.
        """
        return self._request(submission)

    def get(self, query: LogQuery) -> tuple[int, object]:
        """Ask for a result.

        Args:
            query: The log.

        Returns:
            Status and decoded reply; status 0 if no reply came.
        """
        return self._request(query)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _request(self, request: LogSubmission | LogQuery | None) -> tuple[int, object]:
        self._ended.wait(max(0.0, self._next_s - time.monotonic()))
        try:
            if request is None:
                status, reply = self._connection.get(ROUTE_HEALTHZ, {})
            elif isinstance(request, LogSubmission):
                status, reply = self._connection.post(ROUTE_LOGS, request.to_payload())
            else:
                status, reply = self._connection.get(ROUTE_LOGS, request.to_params())
        except (OSError, http.client.HTTPException, ValueError) as error:
            status, reply = 0, f"{type(error).__name__}: {error}"
        self.is_reachable = status > 0
        self.is_refused = _is_for_now(status)
        # The service says that it is asked too often: each time, wait twice as long.
        is_too_often = status == _TOO_MANY
        longer_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._pause_s = longer_s if is_too_often else 0.0
        self._next_s = time.monotonic() + max(self._gap_s, self._pause_s)
        return status, reply


def submit_log(
    client: ServiceClient, job: MonitoredJob, intent: str, evidence: tuple[str, ...] = ()
) -> bool | None:
    """Submit a job's log.

    Args:
        client: The service.
        job: The job.
        intent: "progressive" or "terminal".
        evidence: Lines about the end of the job that are not in its log. Default: none.

    Returns:
        True: the service has it; False: it refuses it for good, and `job.problem` says why; None:
        it did not answer, or not now.
    """
    submission = LogSubmission(
        job.log_path,
        user=job.user or "unknown",
        job_id=job.job_id,
        analysis_intent=intent,
        evidence=evidence,
        attempt_index=job.attempt_index if job.attempt_index >= 0 else None,
    )
    status, reply = client.post(submission)
    if 200 <= status < 300:  # noqa: PLR2004 - the successes of HTTP
        return True
    said = reply.get("message") if isinstance(reply, dict) else reply
    problem = plain(f"status {status}: {said}"[:500])
    # 404: the folder of the log may come yet.
    if _is_for_now(status) or status == _NOT_FOUND:
        logger.warning("job %s: its log is submitted later: %s", job.job_id, problem)
        return None
    job.problem = problem
    logger.warning("job %s: its log is refused: %s", job.job_id, problem)
    return False


def _is_for_now(status: int) -> bool:
    """Tell whether the service may say otherwise later: away, token, too many requests, failure."""
    return status in {0, _UNAUTHORIZED, _TOO_MANY} or status >= _SERVER_ERROR


def fetch_results(client: ServiceClient, job: MonitoredJob) -> AttrSvcResult | None:
    """Ask for the result of a job's log; return None while there is none.

    If the service has forgotten the log, the end of the job is submitted again.

    Args:
        client: The service.
        job: The job; its counters are updated. A refusal that may end, as of a token that is being
            replaced, is no try.
    """
    status, reply = client.get(LogQuery(job.log_path, wait=False))
    job.tries += not _is_for_now(status)
    if status == _NOT_FOUND:
        job.is_terminal_submitted = False
    if status != 200:  # noqa: PLR2004 - OK
        return None
    found = parse_attrsvc_response(reply, log_path=job.log_path)
    return found if found.status in {"completed", "failed"} else None


def log_attribution_result(job: MonitoredJob, result: AttrSvcResult) -> None:
    """Store a verdict with its job, and log it.

    Args:
        job: The job.
        result: The service's reply.
    """
    advice = result.recommendation
    job.action, job.reason = advice.action, plain(advice.reason[:500])
    logger.info(
        "job %s (%s, %s, %s): %s: %s",
        job.job_id,
        plain(job.user),
        plain(job.name),
        job.state,
        job.action,
        job.reason,
    )
