# SPDX-License-Identifier: Apache-2.0
"""Constants of the service and its clients, error codes, and settings of the model."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.attribution.api_keys import DEFAULT_LLM_SAMPLING

__all__ = [
    "DEFAULT_COMPUTE_TIMEOUT_SECONDS",
    "DEFAULT_LLM_BASE_URL",
    "DEFAULT_LLM_MODEL",
    "MAX_JOBS",
    "MIN_FILE_SIZE_KB",
    "MODULE_FR_ONLY",
    "MODULE_LOG_ANALYZER",
    "MODULE_LOG_FR_ANALYZER",
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
    "STATE_NO_LOG",
    "STATE_TIMEOUT",
    "TTL_MAX_JOB_AGE_SECONDS",
    "TTL_PENDING_SECONDS",
    "TTL_TERMINATED_SECONDS",
    "ErrorCode",
    "LogSageExecutionConfig",
    "drop_none_values",
    "llm_runtime_overrides",
    "resolved_llm_runtime_kwargs",
]

TTL_PENDING_SECONDS = 604800
TTL_TERMINATED_SECONDS = 3600
TTL_MAX_JOB_AGE_SECONDS = 15552000
POLL_INTERVAL_SECONDS = 300
MAX_JOBS = 100000
MIN_FILE_SIZE_KB = 4
DEFAULT_COMPUTE_TIMEOUT_SECONDS = 300.0

RESP_MODE = "mode"
RESP_RESULT = "result"
RESP_STATUS = "status"
RESP_LOG_FILE = "log_file"
RESP_WL_RESTART = "wl_restart"
RESP_WL_RESTART_COUNT = "wl_restart_count"
RESP_SCHED_RESTARTS = "sched_restarts"
RESP_LOGS_DIR = "logs_dir"
RESP_FILES_ANALYZED = "files_analyzed"
RESP_MODULE = "module"
RESP_STATE = "state"
RESP_ERROR = "error"
RESP_RESULT_ID = "result_id"

MODULE_LOG_ANALYZER = "log_analyzer"
MODULE_LOG_FR_ANALYZER = "log_fr_analyzer"
MODULE_FR_ONLY = "fr_only"
STATE_NO_LOG = "no_log"
STATE_TIMEOUT = "timeout"

# Nothing is sent anywhere unless the site names an endpoint and a model.
DEFAULT_LLM_MODEL = ""
DEFAULT_LLM_BASE_URL = ""


class ErrorCode(str, enum.Enum):
    """Why a request is refused; `http_status` says it in HTTP.

    Example:
        >>> ErrorCode("outside_root").http_status
        403
    """

    http_status: int

    def __new__(cls, text: str, http_status: int = 0) -> ErrorCode:  # noqa: PYI034 - as Python 3.10
        """Make a code of its text; `http_status` is the status of the reply."""
        code = str.__new__(cls, text)
        code._value_ = text
        code.http_status = http_status
        return code

    INVALID_PATH = ("invalid_path", 400)
    INVALID_PARAMETER = ("invalid_parameter", 400)
    NOT_REGULAR = ("not_regular", 400)
    EMPTY_FILE = ("empty_file", 400)
    OUTSIDE_ROOT = ("outside_root", 403)
    NOT_READABLE = ("not_readable", 403)
    LOGS_DIR_NOT_READABLE = ("logs_dir_not_readable", 403)
    NOT_FOUND = ("not_found", 404)
    FR_DUMP_NOT_FOUND = ("fr_dump_not_found", 404)
    JOB_LIMIT_REACHED = ("job_limit_reached", 503)
    INTERNAL_ERROR = ("internal_error", 500)


@dataclass(frozen=True)
class LogSageExecutionConfig:
    """Where a log is analysed, and what a model may use.

    Attributes:
        use_lib_log_analysis: Analyse in this process; else through the MCP server.
        mcp_server_log_level: Level of that server's log.
        llm_model: Name of the model; None: no model.
        llm_base_url: Address of the model's endpoint; None: no model.
        llm_temperature: Sampling temperature; None: 0.2.
        llm_top_p: Nucleus sampling; None: 0.7.
        llm_max_tokens: Length of the answer; None: 8192.
    """

    use_lib_log_analysis: bool = False
    mcp_server_log_level: str = "INFO"
    llm_model: str | None = None
    llm_base_url: str | None = None
    llm_temperature: float | None = None
    llm_top_p: float | None = None
    llm_max_tokens: int | None = None

    def llm_runtime_overrides(self) -> dict[str, Any]:
        """Return the settings that are given, as `model`, `base_url`, `temperature` and so on."""
        return llm_runtime_overrides(
            model=self.llm_model,
            base_url=self.llm_base_url,
            temperature=self.llm_temperature,
            top_p=self.llm_top_p,
            max_tokens=self.llm_max_tokens,
        )

    def llm_endpoint_overrides(self) -> dict[str, Any]:
        """Return model and address, if set."""
        return llm_runtime_overrides(model=self.llm_model, base_url=self.llm_base_url)

    def pipeline_llm_overrides(self) -> dict[str, Any]:
        """Return the same as the `llm_*` arguments of `run_attribution_pipeline`."""
        return {f"llm_{key}": value for key, value in self.llm_runtime_overrides().items()}


def drop_none_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without keys whose value is None.

    Args:
        values: The mapping.
    """
    return {key: value for key, value in values.items() if value is not None}


def llm_runtime_overrides(
    *,
    model: str | None = None,
    base_url: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the model settings that are not None.

    Args:
        model: Name of the model.
        base_url: Address of its endpoint.
        temperature: Sampling temperature, 0 or more.
        top_p: Sampling probability mass, 0 to 1.
        max_tokens: Most tokens of a reply.
    """
    return drop_none_values(
        {
            "model": model,
            "base_url": base_url,
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
        }
    )


def resolved_llm_runtime_kwargs(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return all model settings, with defaults for those not given.

    Args:
        overrides: Settings from `llm_runtime_overrides`.
    """
    defaults = {
        "model": DEFAULT_LLM_MODEL,
        "base_url": DEFAULT_LLM_BASE_URL,
        **DEFAULT_LLM_SAMPLING,
    }
    return {**defaults, **drop_none_values(overrides or {})}
