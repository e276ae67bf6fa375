# SPDX-License-Identifier: Apache-2.0
"""The service's routes and parameters, and requests through any client like httpx."""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.attribution.orchestration.progressive import normalize_analysis_intent
from nvidia_resiliency_ext.shared_utils.attribution_wire import (
    ROUTE_HEALTHZ,
    ROUTE_LOGS,
    LogQuery,
    LogSubmission,
)

__all__ = [
    "ACCEPT_JSON_HEADERS",
    "PARAM_ANALYSIS_INTENT",
    "PARAM_CYCLE_ID",
    "PARAM_FILE",
    "PARAM_JOB_ID",
    "PARAM_LOG_PATH",
    "PARAM_USER",
    "PARAM_WAIT",
    "PARAM_WL_RESTART",
    "ROUTE_HEALTHZ",
    "ROUTE_LOGS",
    "get_log_response",
    "log_result_params",
    "log_submit_payload",
    "post_log",
]

PARAM_LOG_PATH = "log_path"
PARAM_USER = "user"
PARAM_JOB_ID = "job_id"
PARAM_CYCLE_ID = "cycle_id"
PARAM_ANALYSIS_INTENT = "analysis_intent"
PARAM_FILE = "file"
PARAM_WL_RESTART = "wl_restart"
PARAM_WAIT = "wait"
ACCEPT_JSON_HEADERS = {"Accept": "application/json"}


def log_submit_payload(
    log_path: str,
    *,
    user: str = "unknown",
    job_id: str | None = None,
    cycle_id: int | None = None,
    analysis_intent: str | None = None,
) -> dict[str, Any]:
    """Return the body of `POST /logs`.

    Args:
        log_path: Absolute path of the log on the service's host.
        user: The job's owner. Default "unknown".
        job_id: The job; None: not known.
        cycle_id: Number of the start of the workers, from 0; None: not known.
        analysis_intent: "track_only" (default), "progressive" or "terminal".

    Raises:
        ValueError: `analysis_intent` has another value.
    """
    intent = normalize_analysis_intent(analysis_intent)
    return LogSubmission(log_path, user, job_id, cycle_id, intent).to_payload()


def log_result_params(
    log_path: str, *, file: str | None = None, wl_restart: int | None = None, wait: bool = True
) -> dict[str, str]:
    """Return the query parameters of `GET /logs`.

    Args:
        log_path: The log.
        file: Name of one file of a split log; None: as `wl_restart` says.
        wl_restart: Index of the file, from 0; None: the newest.
        wait: Let the service reply only when the analysis has ended. Default True.

    Example:
        >>> log_result_params("/logs/job.log", wl_restart=1)
        {'log_path': '/logs/job.log', 'wl_restart': '1', 'wait': 'true'}
    """
    return LogQuery(log_path, file, wl_restart, wait).to_params()


def post_log(
    client: Any,
    log_path: str,
    *,
    user: str = "unknown",
    job_id: str | None = None,
    cycle_id: int | None = None,
    analysis_intent: str | None = None,
) -> Any:
    """Send `POST /logs` and return the client's response.

    Args:
        client: Object with `post(route, json=..., headers=...)`, such as `httpx.Client`.
        log_path: Absolute path of the log on the service's host.
        user: The job's owner. Default "unknown".
        job_id: The job; None: not known.
        cycle_id: Number of the start of the workers, from 0; None: not known.
        analysis_intent: "track_only" (default), "progressive" or "terminal".

    Raises:
        ValueError: `analysis_intent` has another value.
    """
    payload = log_submit_payload(
        log_path, user=user, job_id=job_id, cycle_id=cycle_id, analysis_intent=analysis_intent
    )
    return client.post(ROUTE_LOGS, json=payload, headers=ACCEPT_JSON_HEADERS)


def get_log_response(
    client: Any,
    log_path: str,
    *,
    file: str | None = None,
    wl_restart: int | None = None,
    wait: bool = True,
) -> Any:
    """Send `GET /logs` and return the client's response.

    Args:
        client: Object with `get(route, params=..., headers=...)`, such as `httpx.Client`.
        log_path: The log.
        file: Name of one file of a split log; None: as `wl_restart` says.
        wl_restart: Index of the file, from 0; None: the newest.
        wait: Let the service reply only when the analysis has ended. Default True.
    """
    params = log_result_params(log_path, file=file, wl_restart=wl_restart, wait=wait)
    return client.get(ROUTE_LOGS, params=params, headers=ACCEPT_JSON_HEADERS)
