# SPDX-License-Identifier: Apache-2.0
"""Log and traces of one job as one result."""

from __future__ import annotations

import asyncio
import enum
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.attribution._core.errors import NoTraceError
from nvidia_resiliency_ext.attribution.api_keys import load_llm_api_key
from nvidia_resiliency_ext.attribution.combined_log_fr.llm_merge import merge_log_fr_llm
from nvidia_resiliency_ext.attribution.orchestration.utils import (
    log_analyzer_result_payload,
    nvrx_run_result_to_log_dict,
)
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import (
    FRAnalysisResult,
    analyze_fr_dump,
    extract_fr_dump_path,
)

__all__ = [
    "AnalysisPipelineMode",
    "CombinedAnalysisResult",
    "FrDumpPathNotFoundError",
    "run_attribution_pipeline",
]

LogRunner = Callable[[str], Awaitable[Any]]


class AnalysisPipelineMode(str, enum.Enum):
    """Inputs of an analysis."""

    LOG_ONLY = "log_only"
    TRACE_ONLY = "trace_only"
    LOG_AND_TRACE = "log_and_trace"
    LOG_AND_TRACE_WITH_LLM = "log_and_trace_with_llm"


class FrDumpPathNotFoundError(NoTraceError):
    """Only traces were asked for, and none were found."""


@dataclass(frozen=True)
class CombinedAnalysisResult:
    """Result of the analysis of a log and traces.

    Attributes:
        log_result: `{"module", "result", "recommendation"}`; None for traces alone.
        fr_dump_path: Where dumps were found.
        fr_analysis: What they say; None: none, or not readable.
        processing_time: Seconds.
        analysis_completed_at_ms: When, in milliseconds of the epoch.
        llm_merged_summary: Prose of a model.
    """

    log_result: dict[str, Any] | None
    fr_dump_path: str | None
    fr_analysis: FRAnalysisResult | None
    processing_time: float
    analysis_completed_at_ms: int
    llm_merged_summary: str | None = None


async def run_attribution_pipeline(  # noqa: PLR0913 - the public signature
    log_path: str,
    *,
    mode: AnalysisPipelineMode = AnalysisPipelineMode.LOG_AND_TRACE,
    run_logsage: LogRunner | None = None,
    discover_fr_dump_path: Callable[[str], str | None] | None = None,
    run_fr_analysis: Callable[[str], Awaitable[FRAnalysisResult | None]] | None = None,
    run_log_fr_analyzer_mcp: Callable[[Any, Any], Awaitable[str | None]] | None = None,
    fr_dump_path_override: str | None = None,
    llm_model: str | None = None,
    llm_base_url: str | None = None,
    llm_temperature: float | None = None,
    llm_top_p: float | None = None,
    llm_max_tokens: int | None = None,
    llm_api_key: str | None = None,
) -> CombinedAnalysisResult:
    """Analyse a log and the traces of its job, both at once.

    Args:
        log_path: The log.
        mode: What to look at. Default: log and traces.
        run_logsage: Analyses the log; default: the rules.
        discover_fr_dump_path: Finds dumps; default: `extract_fr_dump_path`.
        run_fr_analysis: Analyses dumps; default: `analyze_fr_dump`.
        run_log_fr_analyzer_mcp: Makes prose of both results, in the mode with a model; default:
            the model that is named.
        fr_dump_path_override: Where the dumps are; default: they are looked for.
        llm_model: Name of the model; needed in the mode with a model, without a function for the
            prose.
        llm_base_url: Address of its endpoint, such as `http://host:8000/v1`; needed likewise.
        llm_temperature: Sampling temperature. Default 0.2.
        llm_top_p: Nucleus sampling. Default 0.7.
        llm_max_tokens: Most tokens of the answer. Default 8192.
        llm_api_key: Its key; default: as `api_keys.load_llm_api_key` says.

    Raises:
        FrDumpPathNotFoundError: Only traces were asked for, and there are none.
        UnreadableInputError: The log cannot be read.
        ValueError: The mode with a model was asked for without a function for the prose, and
            without model and address.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        ...     _ = log.write("RuntimeError: CUDA error: out of memory")
        ...     log.flush()
        ...     found = asyncio.run(run_attribution_pipeline(log.name))
        >>> found.log_result["recommendation"]["action"], found.fr_dump_path
        ('STOP', None)
    """
    mode = AnalysisPipelineMode(mode)
    is_with_model = mode is AnalysisPipelineMode.LOG_AND_TRACE_WITH_LLM
    if is_with_model and run_log_fr_analyzer_mcp is None:
        if not llm_model or not llm_base_url:
            text = "run_log_fr_analyzer_mcp, or llm_model and llm_base_url"
            raise ValueError(f"log_and_trace_with_llm needs {text}")
        run_log_fr_analyzer_mcp = functools.partial(
            merge_log_fr_llm,
            llm_api_key=load_llm_api_key() if llm_api_key is None else llm_api_key,
            model=llm_model,
            base_url=llm_base_url,
            temperature=llm_temperature,
            top_p=llm_top_p,
            max_tokens=llm_max_tokens,
        )
    started_s = time.monotonic()
    dumps = None
    if mode is not AnalysisPipelineMode.LOG_ONLY:
        find = discover_fr_dump_path or extract_fr_dump_path
        dumps = fr_dump_path_override or await asyncio.to_thread(find, log_path)
    if mode is AnalysisPipelineMode.TRACE_ONLY and dumps is None:
        raise FrDumpPathNotFoundError(log_path, "no flight-recorder dumps belong to this log")

    async def log_part() -> dict[str, Any] | None:
        if mode is AnalysisPipelineMode.TRACE_ONLY:
            return None
        if run_logsage is None:
            return await asyncio.to_thread(_run_rules, log_path, dumps)
        result = await run_logsage(log_path)
        return result if isinstance(result, dict) else nvrx_run_result_to_log_dict(result, log_path)

    async def trace_part() -> FRAnalysisResult | None:
        return None if dumps is None else await (run_fr_analysis or analyze_fr_dump)(dumps)

    log_result, fr_result = await asyncio.gather(log_part(), trace_part())
    summary = None
    if is_with_model and run_log_fr_analyzer_mcp is not None:
        summary = await run_log_fr_analyzer_mcp(log_result, fr_result)
    return CombinedAnalysisResult(
        log_result,
        dumps,
        fr_result,
        time.monotonic() - started_s,
        int(time.time() * 1000),
        summary,
    )


def _run_rules(log_path: str, dumps: str | None) -> dict[str, Any]:
    from nvidia_resiliency_ext.attribution import engine

    return log_analyzer_result_payload([engine.analyze(log_path, fr_path=dumps).to_item()])
