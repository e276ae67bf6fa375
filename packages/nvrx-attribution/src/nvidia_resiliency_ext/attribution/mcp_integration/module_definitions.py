# SPDX-License-Identifier: Apache-2.0
"""The analyses that the MCP server offers, with the schemas of their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution.combined_log_fr.combined_log_fr import CombinedLogFR
from nvidia_resiliency_ext.attribution.log_analyzer.nvrx_logsage import NVRxLogAnalyzer
from nvidia_resiliency_ext.attribution.mcp_integration.registry import (
    AttributionModuleRegistry,
    global_registry,
)
from nvidia_resiliency_ext.attribution.orchestration.config import (
    MODULE_LOG_ANALYZER,
    MODULE_LOG_FR_ANALYZER,
)
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution import CollectiveAnalyzer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FR_ANALYZER", "ModuleArgs", "create_args_from_dict", "register_all_modules"]

FR_ANALYZER = "fr_analyzer"

_MODEL = {
    "model": {"type": "string", "description": "refine the verdict with this model"},
    "base_url": {"type": "string", "description": "only the address that the server was given"},
    "temperature": {"type": "number"},
    "top_p": {"type": "number"},
    "max_tokens": {"type": "integer"},
}
_LOG = {
    "exclude_nvrx_logs": {
        "type": "boolean",
        "default": False,
        "description": "leave out lines of the launcher",
    },
    "is_per_cycle": {
        "type": "boolean",
        "default": False,
        "description": "the log is that of one cycle",
    },
    "cycle_counter": {"type": "integer", "description": "number of that cycle"},
    **_MODEL,
}
_DUMPS = {
    "pattern": {
        "type": "string",
        "default": "_dump_*",
        "description": "files of a directory",
    },
    "verbose": {"type": "boolean", "default": False},
    "health_check": {"type": "boolean", "default": False},
    "llm_analyze": {"type": "boolean", "default": False, "description": "has no effect"},
}
_LOG_PATH = {"type": "string", "description": "absolute path of the log"}
_FR_PATH = {"type": "string", "description": "directory, file or prefix of the dumps"}


class ModuleArgs(dict[str, Any]):
    """Arguments as a mapping whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        """Return an argument."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no argument {name!r}") from None


def register_all_modules(registry: AttributionModuleRegistry | None = None) -> None:
    """Register `log_analyzer`, `fr_analyzer` and `log_fr_analyzer`; harmless when repeated.

    Args:
        registry: Where; default: `global_registry`.
    """
    target = global_registry if registry is None else registry
    target.register(
        MODULE_LOG_ANALYZER,
        NVRxLogAnalyzer,
        "Say what failed first in the log of a training job, on which rank and node, and whether"
        " a restart helps. `attribution` holds the verdict with the lines that it rests on.",
        _schema({"log_path": _LOG_PATH, **_LOG}, "log_path"),
        {"type": "array"},
    )
    target.register(
        FR_ANALYZER,
        CollectiveAnalyzer,
        "Name the ranks that hold a hung job up, from the dumps of torch's flight recorder.",
        _schema({"fr_path": _FR_PATH, **_DUMPS}, "fr_path"),
        {"type": "object"},
    )
    target.register(
        MODULE_LOG_FR_ANALYZER,
        CombinedLogFR,
        "Put the log and the flight recorder of a job together: give log_path and fr_path, or the"
        " results of both other tools as input_data.",
        _schema(
            {
                "log_path": _LOG_PATH,
                "fr_path": _FR_PATH,
                "input_data": {"type": "array", "description": "[log result, recorder result]"},
                "threshold": {
                    "type": "integer",
                    "default": 0,
                    "description": "ranks that may be excluded",
                },
                "merge_llm": {
                    "type": "boolean",
                    "default": False,
                    "description": "add a summary by the model that the server was given",
                },
                **_LOG,
                **_DUMPS,
            }
        ),
        {"type": "string"},
        dependencies=(MODULE_LOG_ANALYZER, FR_ANALYZER),
    )


def create_args_from_dict(module_name: str, config: Mapping[str, Any]) -> ModuleArgs:
    """Return a module's arguments: the given ones over the schema's defaults.

    Args:
        module_name: The module, such as `fr_analyzer`.
        config: The given arguments.

    Raises:
        ValueError: There is no such module.

    Example:
        >>> create_args_from_dict("fr_analyzer", {"fr_path": "/dumps"}).pattern
        '_dump_*'
    """
    if global_registry.get_module_metadata(module_name) is None:
        register_all_modules()
    return ModuleArgs(global_registry.apply_defaults(module_name, config))


def _schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
