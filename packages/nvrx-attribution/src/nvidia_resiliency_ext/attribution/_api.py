# SPDX-License-Identifier: Apache-2.0
"""The public names of nvrx-attribution; it holds no code.

``nvidia_resiliency_ext.attribution`` (a file of nvrx-common) forwards exactly these names. Each is
imported from its module at first use.
"""

from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

_NAMES = {
    "_core.verdict": ("RawAnalysisResultItem",),
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

__all__ = sorted(name for names in _NAMES.values() for name in names)  # noqa: PLE0605 - the table is the list

__getattr__, __dir__ = lazy_names(globals(), _NAMES)
