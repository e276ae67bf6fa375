# SPDX-License-Identifier: Apache-2.0
"""`CombinedLogFR`: results of the log and of the flight recorder as one pipeline; its program."""

from __future__ import annotations

import argparse
import re
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
from nvidia_resiliency_ext.attribution.combined_log_fr.llm_merge import unpack_run_result
from nvidia_resiliency_ext.attribution.orchestration.config import MODULE_LOG_FR_ANALYZER
from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out

__all__ = ["CombinedLogFR", "main"]

_EXIT_UNREADABLE = 3
_RANKS = re.compile(r"hanging ranks:\s*\[([\d,\s]*)\]")


class CombinedLogFR(NVRxAttribution[dict[str, Any], tuple[str, AttributionState]]):
    """Put the results of log analysis and flight-recorder analysis together.

    Args:
        args: Mapping or namespace with `input_data` = [result of the log, result of the traces]
            and `threshold` (default 0): the state is STOP when more ranks than this are to be
            excluded. Instead of results, `log_path` and `fr_path` may be given: both are then
            analysed and fused by the rules; `allowed_root` and `deadline_s` limit what is read.

    Attributes:
        verdict: That of the newest run with a log; None when results were given.

    Raises:
        ValueError: When it runs and there is neither.
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
            found = _RANKS.search(fr_text)
            ranks = [int(part) for part in found[1].split(",") if part.strip()] if found else []
            return {"log": log_text, "fr": fr_text, "ranks": ranks, "threshold": threshold}
        if not config.get("log_path"):
            raise ValueError("give input_data, or log_path with fr_path")
        path = config.get("fr_path")
        path = path[0] if isinstance(path, list) and path else path
        verdict = self.verdict = engine.analyze(
            config["log_path"],
            fr_path=path or None,
            deadline_s=config.get("deadline_s"),
            allowed_root=config.get("allowed_root"),
        )
        ranks = list(verdict.suspect_ranks)
        return {
            "log": verdict.to_item().raw_text,
            "fr": "" if verdict.fr is None else f"hanging ranks: {verdict.fr['guilty_ranks']}",
            "ranks": ranks,
            "threshold": threshold,
        }

    def combine(self, inputs: dict[str, Any]) -> tuple[str, AttributionState]:
        """Return one text of both results and the ranks to exclude, and the state."""
        is_stop = len(inputs["ranks"]) > inputs["threshold"]
        parts = [inputs["log"], inputs["fr"], f"ranks to exclude: {inputs['ranks']}"]
        text = "\n\n".join(part for part in parts if part)
        return text, AttributionState.STOP if is_stop else AttributionState.CONTINUE

    def print_output(self, combined: tuple[str, AttributionState]) -> tuple[str, AttributionState]:
        """Return (text, state) as they are."""
        return combined

    def reply_parts(self, text: str, state: AttributionState) -> dict[str, Any]:
        """Return what a service answers; ranks to exclude alone are no reason to stop a job."""
        del state
        action = "UNKNOWN" if self.verdict is None else self.verdict.action
        return {
            "result": text,
            "recommendation": {"action": action, "source": MODULE_LOG_FR_ANALYZER},
            "attribution": None if self.verdict is None else self.verdict.to_dict(),
        }


def main(argv: list[str] | None = None) -> int:
    """Run the program: analyse a log and dumps, and print both together."""
    parser = argparse.ArgumentParser(description="Put log and flight recorder together.")
    parser.add_argument("--log-path", required=True, help="the log")
    parser.add_argument("--fr-path", nargs="+", required=True, help="where the dumps are")
    parser.add_argument("--threshold", type=int, default=0, help="ranks that may be excluded")
    accepted = "accepted; the rules need no model"
    for flags in (("-m", "--model"), ("-b", "--base_url"), ("-t", "--temperature")):
        parser.add_argument(*flags, help=accepted)
    parser.add_argument("-p", "--top_p", help=accepted)
    parser.add_argument("--max_tokens", help=accepted)
    args = parser.parse_args(argv)
    try:
        with CombinedLogFR(args) as combined:
            text, state = combined.run_sync(args)
    except (UnreadableInputError, NoTraceError) as error:
        write_err(plain(f"error: {error}") + "\n")
        return _EXIT_UNREADABLE
    write_out(f"{text}\n\n{state.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
