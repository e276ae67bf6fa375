# SPDX-License-Identifier: Apache-2.0
"""The public names of nvrx-attribution; it holds no code.

``nvidia_resiliency_ext.attribution`` (a file of nvrx-common) forwards exactly these names. Each is
imported from its module at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._core.results import RawAnalysisResultItem
    from nvidia_resiliency_ext.attribution.analyzer import Analyzer
    from nvidia_resiliency_ext.attribution.coalescing import (
        CacheResult,
        CoalescerStats,
        InflightResult,
        LogAnalysisCoalesced,
        RequestCoalescer,
        StatsResult,
        SubmittedResult,
        coalesced_from_cache,
    )
    from nvidia_resiliency_ext.attribution.controller import (
        AttributionAnalysisConfig,
        AttributionCacheConfig,
        AttributionController,
        AttributionControllerConfig,
        AttributionCredentialsConfig,
        AttributionPostprocessingConfig,
    )
    from nvidia_resiliency_ext.attribution.orchestration.analysis_pipeline import (
        AnalysisPipelineMode,
        CombinedAnalysisResult,
        FrDumpPathNotFoundError,
        run_attribution_pipeline,
    )
    from nvidia_resiliency_ext.attribution.orchestration.client_response import (
        AttrSvcResult,
        parse_attrsvc_response,
        recommendation_should_stop,
    )
    from nvidia_resiliency_ext.attribution.orchestration.config import (
        DEFAULT_COMPUTE_TIMEOUT_SECONDS,
        MAX_JOBS,
        MIN_FILE_SIZE_KB,
        POLL_INTERVAL_SECONDS,
        RESP_ERROR,
        RESP_FILES_ANALYZED,
        RESP_LOG_FILE,
        RESP_LOGS_DIR,
        RESP_MODE,
        RESP_MODULE,
        RESP_RESULT,
        RESP_RESULT_ID,
        RESP_SCHED_RESTARTS,
        RESP_STATE,
        RESP_STATUS,
        RESP_WL_RESTART,
        RESP_WL_RESTART_COUNT,
        STATE_TIMEOUT,
        TTL_MAX_JOB_AGE_SECONDS,
        TTL_PENDING_SECONDS,
        TTL_TERMINATED_SECONDS,
        ErrorCode,
    )
    from nvidia_resiliency_ext.attribution.orchestration.job import FileInfo, Job, JobMode
    from nvidia_resiliency_ext.attribution.orchestration.slurm_parser import SplitlogTracker
    from nvidia_resiliency_ext.attribution.orchestration.types import (
        AttributionRecommendation,
        LogAnalysisCycleResult,
        LogAnalysisSplitlogResult,
        LogAnalyzerConfig,
        LogAnalyzerError,
        LogAnalyzerFilePreview,
        LogAnalyzerOutcome,
        LogAnalyzerSubmitResult,
    )
    from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import TraceAnalyzer

__all__ = [
    "DEFAULT_COMPUTE_TIMEOUT_SECONDS",
    "MAX_JOBS",
    "MIN_FILE_SIZE_KB",
    "POLL_INTERVAL_SECONDS",
    "RESP_ERROR",
    "RESP_FILES_ANALYZED",
    "RESP_LOGS_DIR",
    "RESP_LOG_FILE",
    "RESP_MODE",
    "RESP_MODULE",
    "RESP_RESULT",
    "RESP_RESULT_ID",
    "RESP_SCHED_RESTARTS",
    "RESP_STATE",
    "RESP_STATUS",
    "RESP_WL_RESTART",
    "RESP_WL_RESTART_COUNT",
    "STATE_TIMEOUT",
    "TTL_MAX_JOB_AGE_SECONDS",
    "TTL_PENDING_SECONDS",
    "TTL_TERMINATED_SECONDS",
    "AnalysisPipelineMode",
    "Analyzer",
    "AttrSvcResult",
    "AttributionAnalysisConfig",
    "AttributionCacheConfig",
    "AttributionController",
    "AttributionControllerConfig",
    "AttributionCredentialsConfig",
    "AttributionPostprocessingConfig",
    "AttributionRecommendation",
    "CacheResult",
    "CoalescerStats",
    "CombinedAnalysisResult",
    "ErrorCode",
    "FileInfo",
    "FrDumpPathNotFoundError",
    "InflightResult",
    "Job",
    "JobMode",
    "LogAnalysisCoalesced",
    "LogAnalysisCycleResult",
    "LogAnalysisSplitlogResult",
    "LogAnalyzerConfig",
    "LogAnalyzerError",
    "LogAnalyzerFilePreview",
    "LogAnalyzerOutcome",
    "LogAnalyzerSubmitResult",
    "RawAnalysisResultItem",
    "RequestCoalescer",
    "SplitlogTracker",
    "StatsResult",
    "SubmittedResult",
    "TraceAnalyzer",
    "coalesced_from_cache",
    "parse_attrsvc_response",
    "recommendation_should_stop",
    "run_attribution_pipeline",
]

_PACKAGE = "nvidia_resiliency_ext.attribution."
_NAMES = {
    "_core.results": ("RawAnalysisResultItem",),
    "analyzer": ("Analyzer",),
    "coalescing": (
        "CacheResult",
        "CoalescerStats",
        "InflightResult",
        "LogAnalysisCoalesced",
        "RequestCoalescer",
        "StatsResult",
        "SubmittedResult",
        "coalesced_from_cache",
    ),
    "controller": (
        "AttributionAnalysisConfig",
        "AttributionCacheConfig",
        "AttributionController",
        "AttributionControllerConfig",
        "AttributionCredentialsConfig",
        "AttributionPostprocessingConfig",
    ),
    "orchestration.analysis_pipeline": (
        "AnalysisPipelineMode",
        "CombinedAnalysisResult",
        "FrDumpPathNotFoundError",
        "run_attribution_pipeline",
    ),
    "orchestration.client_response": (
        "AttrSvcResult",
        "parse_attrsvc_response",
        "recommendation_should_stop",
    ),
    "orchestration.config": (
        "DEFAULT_COMPUTE_TIMEOUT_SECONDS",
        "ErrorCode",
        "MAX_JOBS",
        "MIN_FILE_SIZE_KB",
        "POLL_INTERVAL_SECONDS",
        "RESP_ERROR",
        "RESP_FILES_ANALYZED",
        "RESP_LOGS_DIR",
        "RESP_LOG_FILE",
        "RESP_MODE",
        "RESP_MODULE",
        "RESP_RESULT",
        "RESP_RESULT_ID",
        "RESP_SCHED_RESTARTS",
        "RESP_STATE",
        "RESP_STATUS",
        "RESP_WL_RESTART",
        "RESP_WL_RESTART_COUNT",
        "STATE_TIMEOUT",
        "TTL_MAX_JOB_AGE_SECONDS",
        "TTL_PENDING_SECONDS",
        "TTL_TERMINATED_SECONDS",
    ),
    "orchestration.job": (
        "FileInfo",
        "Job",
        "JobMode",
    ),
    "orchestration.slurm_parser": ("SplitlogTracker",),
    "orchestration.types": (
        "AttributionRecommendation",
        "LogAnalysisCycleResult",
        "LogAnalysisSplitlogResult",
        "LogAnalyzerConfig",
        "LogAnalyzerError",
        "LogAnalyzerFilePreview",
        "LogAnalyzerOutcome",
        "LogAnalyzerSubmitResult",
    ),
    "trace_analyzer.fr_support": ("TraceAnalyzer",),
}
_HOMES = {name: _PACKAGE + module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Return a public name from its module."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(home), name)
