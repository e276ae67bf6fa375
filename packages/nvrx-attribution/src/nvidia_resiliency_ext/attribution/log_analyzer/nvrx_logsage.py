# SPDX-License-Identifier: Apache-2.0
"""`NVRxLogAnalyzer`: the log engine as an attribution pipeline, and its program.

A result is a list of (raw text of five lines, state) pairs, one for each cycle.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._core.errors import UnreadableInputError
from nvidia_resiliency_ext.attribution._core.files import open_confined
from nvidia_resiliency_ext.attribution._logs.dialects import is_launcher_line
from nvidia_resiliency_ext.attribution.base import (
    AttributionState,
    NVRxAttribution,
    merged_attribution_config,
    normalize_attribution_args,
)
from nvidia_resiliency_ext.attribution.orchestration.utils import log_analyzer_result_payload
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["NVRxLogAnalyzer", "chunk_logs_strict", "lines_after", "main"]

_EXIT_UNREADABLE = 3
_CYCLE = re.compile(r"profiling.py:.*Cycle: (\d{1,9})")
_STARTED = "FT: initialized"
_LINE_BYTES = 64 * 1024
_FED_CHARS = 1 << 20
_MOST_CYCLES = 100


CycleResults = list[tuple[str, AttributionState]]


class NVRxLogAnalyzer(NVRxAttribution[list[engine.Verdict], CycleResults]):
    """Say for each cycle of a log what failed and whether a restart helps; no model is needed.

    Args:
        args: Mapping or namespace with `log_path` and, as needed, `exclude_nvrx_logs` (leave out
            lines of the launcher), `is_per_cycle` (the log is that of one cycle; default: cut it
            at the launcher's cycle lines; the newest 100 count), `cycle_counter` (number of that
            cycle), `allowed_root` (a log outside of it is not read), `deadline_s` (seconds to read
            for). Keys of the model-based analyzer of old are taken and have no effect on the rules.

    Attributes:
        verdicts: Those of the newest run, one per cycle.

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
        self.verdicts: list[engine.Verdict] = []
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
        deadline_s = config.get("deadline_s")
        root = config.get("allowed_root")
        skips_launcher = bool(config.get("exclude_nvrx_logs"))
        if config.get("is_per_cycle"):
            scanner = engine.LogScanner(cycle_id=cycle_id)
            limits = {"deadline_s": deadline_s, "allowed_root": root}
            engine.read_log(scanner, str(path), **limits, skips_launcher=skips_launcher)
            return [scanner.finish()]
        try:
            with open(path if root is None else open_confined(str(path), root), "rb") as log:
                lines = iter(lambda: log.readline(_LINE_BYTES).decode("latin-1"), "")
                if skips_launcher:
                    lines = (line for line in lines if not is_launcher_line(line))
                return _verdicts(_by_cycle(lines), cycle_id, Deadline.after(deadline_s))
        except OSError as error:
            raise UnreadableInputError(str(path), error.strerror or str(error)) from None

    async def keep_verdicts(self, verdicts: list[engine.Verdict]) -> list[engine.Verdict]:
        """Return the verdicts as they are: the rules have said all."""
        self.verdicts = verdicts
        return verdicts

    @property
    def verdict(self) -> engine.Verdict | None:
        """That of the newest cycle; None before a run."""
        return self.verdicts[-1] if self.verdicts else None

    def reply_parts(self, results: CycleResults, state: AttributionState) -> dict[str, Any]:
        """Return the parts of a service's reply: items, recommendation and the newest verdict.

        Args:
            results: Not used: the verdicts are kept.
            state: Not used.
        """
        del results, state
        payload = log_analyzer_result_payload(verdict.to_item() for verdict in self.verdicts)
        newest = self.verdict
        return {**payload, "attribution": None if newest is None else newest.to_dict()}

    async def print_output(
        self, verdicts: list[engine.Verdict]
    ) -> tuple[CycleResults, AttributionState]:
        """Return ((raw text, state) per cycle, state of the newest cycle)."""
        results = [(verdict.to_item().raw_text, _state(verdict)) for verdict in verdicts]
        return results, results[-1][1] if results else AttributionState.CONTINUE


def lines_after(lines: list[str], needle: str) -> list[str]:
    """Return the lines after the first that contains a text; all if none does.

    Args:
        lines: The lines of the log.
        needle: The text.
    """
    for index, line in enumerate(lines):
        if needle in line:
            return lines[index + 1 :]
    return lines


def chunk_logs_strict(lines: list[str]) -> dict[int, list[str]]:
    """Cut a log into cycles at the lines in which the launcher's profiling counts them.

    Args:
        lines: The lines of the log.

    Returns:
        Cycle -> its lines, without the marking lines and all up to "FT: initialized". A log
        without such lines is cycle 0 as a whole.
    """
    chunks: dict[int | None, list[str]] = {}
    for cycle, line in _by_cycle(lines):
        chunk = chunks.setdefault(cycle, [])
        if line is None:
            chunk.clear()
        else:
            chunk.append(line)
    before = chunks.pop(None, [])
    return {cycle: chunk for cycle, chunk in chunks.items() if cycle is not None} or {0: before}


def _by_cycle(lines: Iterable[str]) -> Iterator[tuple[int | None, str | None]]:
    """Yield each line with its cycle; None as line: those of this cycle so far do not count.

    The cycle is None before the first line that counts cycles.
    """
    cycle: int | None = None
    seen: set[int | None] = set()
    started: set[int | None] = {None}
    for line in lines:
        match = _CYCLE.search(line)
        if match is not None:
            cycle = int(match[1])
            if cycle not in seen:
                seen.add(cycle)
                yield cycle, None
        elif _STARTED in line and cycle not in started:
            started.add(cycle)
            yield cycle, None
        else:
            yield cycle, line


def _verdicts(
    parts: Iterable[tuple[int | None, str | None]], cycle_id: int | None, deadline: Deadline
) -> list[engine.Verdict]:
    """Return a verdict per cycle, reading each line once; of the newest cycles only."""
    scanners: dict[int | None, engine.LogScanner] = {}
    waiting: list[str] = []
    waiting_chars = 0
    current: int | None = None

    def feed() -> None:
        scanner = scanners.get(current)
        if scanner is None:
            number = cycle_id if current is None else current
            scanner = scanners[current] = engine.LogScanner(cycle_id=number)
            if len(scanners) > _MOST_CYCLES:
                del scanners[next(iter(scanners))]
        scanner.feed("".join(waiting).encode("latin-1"))
        waiting.clear()

    for cycle, line in parts:
        if cycle != current or waiting_chars >= _FED_CHARS:
            feed()
            waiting_chars = 0
            if deadline.expired():
                scanners[current].mark_truncated()
                break
        current = cycle
        if line is None:
            waiting.clear()
            scanners.pop(current, None)
        else:
            waiting.append(line)
            waiting_chars += len(line)
    feed()
    if len(scanners) > 1:
        scanners.pop(None, None)
    numbered = sorted(scanners.items(), key=lambda item: -1 if item[0] is None else item[0])
    return [scanner.finish() for _, scanner in numbered]


def main(argv: list[str] | None = None) -> int:
    """Run the program: print the verdict of each cycle of a log.

    Args:
        argv: The arguments without the program's name; None: those of the process.
    """
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


def _state(verdict: engine.Verdict) -> AttributionState:
    return AttributionState.STOP if verdict.action == "STOP" else AttributionState.CONTINUE


if __name__ == "__main__":
    sys.exit(main())
