# SPDX-License-Identifier: Apache-2.0
"""`CombinedLogFR`: results of the log and of the flight recorder as one pipeline; its program."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._core.errors import NoTraceError, UnreadableInputError
from nvidia_resiliency_ext.attribution.base import (
    AttributionState,
    NVRxAttribution,
    merged_attribution_config,
    normalize_attribution_args,
)
from nvidia_resiliency_ext.attribution.combined_log_fr.llm_merge import (
    summarize,
    unpack_run_result,
)
from nvidia_resiliency_ext.attribution.refine import ModelSettings, model_settings_from_environ
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution import CollectiveAnalyzer
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import ranks_in
from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, MissingExtraError

__all__ = ["CombinedLogFR", "main"]

_EXIT_USAGE = 2
_EXIT_UNREADABLE = 3


class CombinedLogFR(NVRxAttribution[dict[str, Any], str]):
    """Put the results of log analysis and flight-recorder analysis together.

    Args:
        args: Mapping or namespace with `input_data` = [result of the log, result of the traces]
            and `threshold` (default 0): the state is STOP when more ranks than this are to be
            excluded. Instead of results, `log_path` and `fr_path` may be given: both are then
            analysed and fused by the rules. `fr_path` may be a list, `pattern` chooses files of a
            directory, `exclude_nvrx_logs` leaves out lines of the launcher; `allowed_root` and
            `deadline_s` limit what is read.

    Attributes:
        verdict: That of the newest run with a log; None when results were given.

    Raises:
        ValueError: When it runs and there is neither.

    Example:
        >>> given = {"input_data": ["NCCL timeout", "hanging ranks: [3]"]}
        >>> with CombinedLogFR(given) as combined:
        ...     text, state = combined.run_sync({})
        >>> text.splitlines()[-1], state.name
        ('ranks to exclude: [3]', 'STOP')
    """

    def __init__(self, args: Any) -> None:
        self._init_config = normalize_attribution_args(args)
        self.verdict: engine.Verdict | None = None
        super().__init__(self.load_inputs, self.combine, self.print_output)

    def load_inputs(self) -> dict[str, Any]:
        """Return texts of both results, the ranks, and the verdict when the rules made one.

        Raises:
            ValueError: There is no input.
        """
        config = merged_attribution_config(self._init_config)
        threshold = int(config.get("threshold") or 0)
        data = config.get("input_data")
        self.verdict = None
        if data:
            log_text, fr_text = (unpack_run_result(item)[0] for item in (*data, "")[:2])
            ranks = ranks_in(fr_text)
            return {"log": log_text, "fr": fr_text, "ranks": ranks, "threshold": threshold}
        if not config.get("log_path"):
            raise ValueError("give input_data, or log_path with fr_path")
        verdict = self.verdict = _verdict_of(config)
        ranks = list(verdict.suspect_ranks)
        return {
            "log": verdict.to_item().raw_text,
            "fr": "" if verdict.fr is None else f"hanging ranks: {verdict.fr['guilty_ranks']}",
            "ranks": ranks,
            "threshold": threshold,
        }

    def combine(self, inputs: dict[str, Any]) -> tuple[str, AttributionState]:
        """Return one text of both results with the ranks to exclude, and the state.

        Args:
            inputs: `log` and `fr` (texts), `ranks` (to exclude) and `threshold` (how many may be).
        """
        is_stop = len(inputs["ranks"]) > inputs["threshold"]
        parts = [inputs["log"], inputs["fr"], f"ranks to exclude: {inputs['ranks']}"]
        text = "\n\n".join(part for part in parts if part)
        return text, AttributionState.STOP if is_stop else AttributionState.CONTINUE

    def print_output(self, combined: tuple[str, AttributionState]) -> tuple[str, AttributionState]:
        """Return the result of `combine` unchanged.

        Args:
            combined: The text and the state.
        """
        return combined

    def reply_parts(self, text: str, state: AttributionState) -> dict[str, Any]:
        """Return a service's reply; ranks to exclude alone are no reason to stop a job.

        Args:
            text: The combined text.
            state: Not used.
        """
        del state
        action = "UNKNOWN" if self.verdict is None else self.verdict.action
        return {
            "result": text,
            "recommendation": {"action": action},
            "attribution": None if self.verdict is None else self.verdict.to_dict(),
        }


def main(argv: list[str] | None = None) -> int:
    """Run the program: analyse a log and dumps, and print both together.

    Args:
        argv: The arguments without the program's name; None: those of the process.
    """
    parser = argparse.ArgumentParser(description="Put log and flight recorder together.")
    parser.add_argument("--log-path", required=True, help="the log")
    parser.add_argument("--fr-path", nargs="+", required=True, help="where the dumps are")
    parser.add_argument("--pattern", help="files of a directory (_dump_*)")
    parser.add_argument("--exclude_nvrx_logs", action="store_true", help="skip launcher lines")
    parser.add_argument("--threshold", type=int, default=0, help="ranks that may be excluded")
    parser.add_argument("-v", "--verbose", action="store_true", help="show groups and suspects")
    parser.add_argument("-c", "--health-check", action="store_true", help="show health checks")
    parser.add_argument(
        "-l", "--llm-analyze", action="store_true", help="add a summary by a model (-m, -b)"
    )
    parser.add_argument("-m", "--model", help="name of the model (NVRX_LLM_MODEL)")
    parser.add_argument("-b", "--base_url", help="address of its endpoint (NVRX_LLM_BASE_URL)")
    parser.add_argument("-t", "--temperature", type=float, help="sampling temperature (0.2)")
    parser.add_argument("-p", "--top_p", type=float, help="nucleus sampling (0.7)")
    parser.add_argument("--max_tokens", type=int, help="length of the summary (8192)")
    args = parser.parse_args(argv)
    try:
        model = _model_of(args) if args.llm_analyze else None
        with CombinedLogFR(args) as combined:
            text, state = combined.run_sync(args)
        if args.verbose or args.health_check:
            _show_traces(args)
        if model is not None:
            text = "\n\n".join(filter(None, (text, asyncio.run(summarize(text, "", model)))))
    except (UnreadableInputError, NoTraceError) as error:
        write_err(plain(f"error: {error}") + "\n")
        return _EXIT_UNREADABLE
    except (ConfigError, MissingExtraError) as error:
        write_err(plain(f"error: {error}") + "\n")
        return _EXIT_USAGE
    write_out(f"{text}\n\n{state.name}\n")
    return 0


def _verdict_of(config: dict[str, Any]) -> engine.Verdict:
    root = config.get("allowed_root")
    report = engine.fr_report_of(config.get("fr_path"), root, config.get("pattern"))
    scanner = engine.LogScanner(fr_report=report)
    engine.read_log(
        scanner,
        str(config["log_path"]),
        deadline_s=config.get("deadline_s"),
        allowed_root=root,
        skips_launcher=bool(config.get("exclude_nvrx_logs")),
    )
    return scanner.finish()


def _show_traces(args: argparse.Namespace) -> None:
    for path in args.fr_path:
        shown = {**vars(args), "fr_path": path}
        with CollectiveAnalyzer(shown) as analyzer:
            analyzer.run_sync(shown)


def _model_of(args: argparse.Namespace) -> ModelSettings:
    """Return the model that flags and environment name.

    Raises:
        ConfigError: None is named.
    """
    given = {**os.environ}
    if args.base_url is not None:
        given["NVRX_ATTRSVC_LLM_BASE_URL"] = args.base_url
    settings = model_settings_from_environ(given, vars(args))
    if settings is None:
        raise ConfigError("--llm-analyze: no model endpoint; give -b or set NVRX_LLM_BASE_URL")
    return settings


if __name__ == "__main__":
    sys.exit(main())
