# SPDX-License-Identifier: Apache-2.0
"""`NVRxLogAnalyzer`: the log engine as an attribution pipeline, and its program.

A result is a list of (raw text of five lines, state) pairs, one for each cycle.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from typing import Any

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._core.errors import UnreadableInputError
from nvidia_resiliency_ext.attribution.base import (
    AttributionState,
    NVRxAttribution,
    merged_attribution_config,
    normalize_attribution_args,
)
from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out

__all__ = ["NVRxLogAnalyzer", "chunk_logs_strict", "lines_after", "main"]

_EXIT_UNREADABLE = 3
_CYCLE = re.compile(r"profiling.py:.*Cycle: (\d{1,9})")
_STARTED = "FT: initialized"
# Lines that the launcher and its monitors write; a caller can leave them out.
_OWN_LINES = re.compile(rb"\bnvrx\b|fault_tolerance|\[NestedRestarter\]", re.IGNORECASE)


CycleResults = list[tuple[str, AttributionState]]


class NVRxLogAnalyzer(NVRxAttribution[list[engine.Verdict], CycleResults]):
    """Say for each cycle of a log what failed and whether a restart helps; no model is needed.

    Args:
        args: Mapping or namespace with `log_path` and, as needed, `exclude_nvrx_logs` (leave out
            lines of the launcher), `is_per_cycle` (the log is that of one cycle; default: cut it
            at the launcher's cycle lines), `cycle_counter` (number of that cycle). Keys of the
            model-based analyzer of old are taken and have no effect on the rules.

    Raises:
        UnreadableInputError: When it runs and the log cannot be read.

    Example:
        >>> analyzer = NVRxLogAnalyzer({"log_path": "job.log", "is_per_cycle": True})
        >>> results, state = analyzer.run_sync({})  # doctest: +SKIP
        >>> results[0][0].splitlines()[0]  # doctest: +SKIP
        'STOP - DONT RESTART IMMEDIATE'
    """

    def __init__(self, args: Any) -> None:
        self._init_config = normalize_attribution_args(args)
        super().__init__(self.analyze_logs, self.keep_verdicts, self.print_output)

    def analyze_logs(self) -> list[engine.Verdict]:
        """Return one verdict per cycle.

        Raises:
            UnreadableInputError: The log cannot be read.
            ValueError: No log is named.
        """
        config = merged_attribution_config(self._init_config)
        path = config.get("log_path")
        if not path:
            raise ValueError("log_path is not set: give the log")
        cycle_id = config.get("cycle_counter")
        if config.get("is_per_cycle") and not config.get("exclude_nvrx_logs"):
            return [engine.analyze(path, cycle_id=cycle_id)]
        lines = _read_lines(str(path))
        if config.get("exclude_nvrx_logs"):
            lines = [line for line in lines if not _OWN_LINES.search(line.encode())]
        if config.get("is_per_cycle"):
            return [_analyze_lines(lines, cycle_id)]
        chunks = chunk_logs_strict(lines)
        return [_analyze_lines(chunk, cycle) for cycle, chunk in sorted(chunks.items())]

    async def keep_verdicts(self, verdicts: list[engine.Verdict]) -> list[engine.Verdict]:
        """Return the verdicts as they are: the rules have said all."""
        return verdicts

    async def print_output(
        self, verdicts: list[engine.Verdict]
    ) -> tuple[CycleResults, AttributionState]:
        """Return ((raw text, state) per cycle, state of the newest cycle)."""
        results = [(verdict.to_item().raw_text, _state(verdict)) for verdict in verdicts]
        return results, results[-1][1] if results else AttributionState.CONTINUE


def lines_after(lines: list[str], needle: str) -> list[str]:
    """Return the lines after the first that holds a text; all when none does."""
    for index, line in enumerate(lines):
        if needle in line:
            return lines[index + 1 :]
    return lines


def chunk_logs_strict(lines: list[str]) -> dict[int, list[str]]:
    """Cut a log into cycles at the lines in which the launcher's profiling counts them.

    Returns:
        Cycle -> its lines, without the marking lines and all up to "FT: initialized". A log
        without such lines is cycle 0 as a whole.
    """
    chunks: dict[int, list[str]] = {}
    current: list[str] | None = None
    for line in lines:
        match = _CYCLE.search(line)
        if match is not None:
            current = chunks.setdefault(int(match[1]), [])
        elif current is not None:
            current.append(line)
    if not chunks:
        return {0: lines}
    return {cycle: lines_after(chunk, _STARTED) for cycle, chunk in chunks.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the program: print the verdict of each cycle of a log."""
    parser = argparse.ArgumentParser(description="Say whether a restart helps.")
    parser.add_argument("--log-path", required=True, help="the log")
    accepted = "accepted; the rules need no model"
    parser.add_argument("-m", "--model", help=accepted)
    parser.add_argument("-b", "--base_url", help=accepted)
    parser.add_argument("-t", "--temperature", type=float, help=accepted)
    parser.add_argument("-p", "--top_p", type=float, help=accepted)
    parser.add_argument("--max_tokens", type=int, help=accepted)
    parser.add_argument("--exclude_nvrx_logs", action="store_true", help="skip launcher lines")
    parser.add_argument("--is_per_cycle", action="store_true", help="the log is of one cycle")
    parser.add_argument("--emit-stdout", action="store_true", help="print on stdout")
    args = parser.parse_args(argv)
    try:
        with NVRxLogAnalyzer(args) as analyzer:
            results, _ = analyzer.run_sync(args)
    except UnreadableInputError as error:
        write_err(plain(f"error: {error}") + "\n")
        return _EXIT_UNREADABLE
    text = "\n\n".join(raw for raw, _ in results) + "\n"
    if args.emit_stdout:
        write_out(text)
    else:
        write_err(text)
    return 0


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return [line.decode("utf-8", "replace").rstrip("\n") for line in file]
    except OSError as error:
        raise UnreadableInputError(path, error.strerror or str(error)) from None


def _analyze_lines(lines: list[str], cycle_id: int | None) -> engine.Verdict:
    data = "".join(f"{line}\n" for line in lines).encode()
    return engine.analyze(io.BytesIO(data), cycle_id=cycle_id)


def _state(verdict: engine.Verdict) -> AttributionState:
    return AttributionState.STOP if verdict.action == "STOP" else AttributionState.CONTINUE


if __name__ == "__main__":
    sys.exit(main())
