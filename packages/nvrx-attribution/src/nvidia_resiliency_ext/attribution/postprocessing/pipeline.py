# SPDX-License-Identifier: Apache-2.0
"""Exported records of verdicts, and the thread that sends them."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from nvidia_resiliency_ext.attribution._core.verdict import RawAnalysisResultItem
from nvidia_resiliency_ext.attribution.orchestration.llm_output import (
    log_fields_for_dataflow_record,
    logsage_recommendation,
)
from nvidia_resiliency_ext.attribution.orchestration.types import AttributionRecommendation
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import (
    FRAnalysisResult,
    fr_fields_for_dataflow_record,
)

__all__ = ["ResultPoster", "build_dataflow_record", "post_analysis_items"]

logger = logging.getLogger("nvrx")

_MOST_WAITING = 256
_TRIES = 4
_FIRST_PAUSE_S = 0.5


def build_dataflow_record(  # noqa: PLR0913 - the fields of the record
    items: Iterable[RawAnalysisResultItem],
    *,
    log_path: str,
    cluster: str = "",
    user: str = "",
    job_id: str = "",
    duration_s: float = 0.0,
    completed_ms: int | None = None,
    recommendation: AttributionRecommendation | None = None,
    fr_dump_path: str | None = None,
    fr_result: FRAnalysisResult | None = None,
) -> dict[str, Any]:
    """Return the flat record that sites collect about one analysis.

    Prefixes say the type: `s_` text, `d_` number, `ts_` milliseconds of the epoch, `l_` list.

    Args:
        items: The result items, oldest first.
        log_path: The analysed log.
        cluster: Name of the cluster.
        user: The job's owner.
        job_id: The job.
        duration_s: Seconds that the analysis took. Default 0.
        completed_ms: End of the analysis in milliseconds since 1970; None: now.
        recommendation: The recommendation; None: computed from the items.
        fr_dump_path: Path of the flight recorder dumps; None: there are none.
        fr_result: Their analysis; None: there is none.
    """
    kept = list(items)
    advice = recommendation or logsage_recommendation(kept)
    return {
        "s_cluster": cluster,
        "s_user": user,
        "s_job_id": job_id,
        "s_log_path": log_path,
        "s_recommendation_action": advice.action,
        "s_recommendation_source": advice.source,
        **log_fields_for_dataflow_record(kept),
        "s_attribution_result_json": json.dumps([item.to_payload() for item in kept]),
        "d_attribution_analysis_duration_seconds": duration_s,
        "ts_attribution_analysis_completed_ms": (
            int(time.time() * 1000) if completed_ms is None else completed_ms
        ),
        **fr_fields_for_dataflow_record(fr_dump_path, fr_result),
    }


class ResultPoster:
    """Send records in a thread of its own; what cannot be sent is logged and dropped.

    Args:
        post_fn: Sends one record; raises OSError when that is to be tried again.
        tries: How often one record is tried, with growing pauses. Default 4.

    Example:
        >>> sent = []
        >>> poster = ResultPoster(sent.append)
        >>> poster.post(build_dataflow_record([], log_path="/logs/job.log", job_id="42"))
        True
        >>> poster.close()
        >>> sent[0]["s_job_id"], sent[0]["s_recommendation_action"]
        ('42', 'UNKNOWN')
    """

    def __init__(self, post_fn: Callable[[dict[str, Any]], None], tries: int = _TRIES) -> None:
        self._post = post_fn
        self._tries = tries
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvrx-poster", daemon=True)
        self._thread.start()

    def post(self, record: dict[str, Any]) -> bool:
        """Hand a record over without waiting; False when too many wait.

        Args:
            record: The record; see `build_dataflow_record`.
        """
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            logger.warning("%d records wait to be sent; one is dropped", _MOST_WAITING)
            return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Try to send each waiting record once more, and end the thread.

        Args:
            timeout_s: Seconds to wait for that at most. Default 5.
        """
        self._closing.set()
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return  # the thread is a daemon and ends with the process
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._send(record)

    def _send(self, record: dict[str, Any]) -> None:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, self._tries + 1):
            try:
                self._post(record)
            except (OSError, ValueError) as error:
                if attempt == self._tries or self._closing.wait(pause_s):
                    logger.warning("a record cannot be sent, it is dropped: %s", error)
                    return
                pause_s *= 2
            else:
                return


def post_analysis_items(
    poster: ResultPoster, items: Iterable[RawAnalysisResultItem], **fields: Any
) -> bool:
    """Build the record of an analysis and queue it for sending.

    Args:
        poster: Sends the record.
        items: The result items, oldest first.
        fields: Other arguments of `build_dataflow_record`.

    Returns:
        False if too many records wait; this one is dropped.
    """
    return poster.post(build_dataflow_record(items, **fields))
