# SPDX-License-Identifier: Apache-2.0
"""`CollectiveAnalyzer`: the flight-recorder analysis as a pipeline, and its program."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution._core.errors import NoTraceError
from nvidia_resiliency_ext.attribution._traces.analysis import (
    TraceAnalysis,
    analyze_dumps,
    hanging_ranks_text,
)
from nvidia_resiliency_ext.attribution._traces.loading import (
    DEFAULT_PATTERN,
    LoadedTraces,
    load_traces,
)
from nvidia_resiliency_ext.attribution._traces.table import format_summary, format_table
from nvidia_resiliency_ext.attribution.base import (
    AttributionState,
    NVRxAttribution,
    effective_run_or_init_config,
    normalize_attribution_args,
)
from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._traces.dumps import Op

__all__ = ["Collective", "CollectiveAnalyzer", "eprint", "main"]

_EXIT_UNREADABLE = 3


@dataclass
class Collective:
    """One recorded operation of one rank.

    Attributes:
        record_id: Its number in the dump.
        file_id: The rank that wrote the dump.
        collective_seq_id: Number of the collective in its group.
        p2p_seq_id: Number of the point-to-point operation in its group.
        pg_id: Number of the process group on this rank.
        op_id: Number of the operation, all kinds counted together.
        profiling_name: Name of the operation, such as `nccl:all_reduce`.
        state: scheduled, started or completed.
        time_created_ns: When it was enqueued, in nanoseconds since 1970.
        time_discovered_started_ns: When it was seen started; 0: never.
        time_discovered_completed_ns: When it was seen completed; 0: never.
        process_group: Name and description of the group.
        input_sizes: Shapes of the inputs.
        output_sizes: Shapes of the outputs.
        input_dtypes: Types of the inputs.
        output_dtypes: Types of the outputs.
    """

    record_id: int
    file_id: int
    collective_seq_id: int
    p2p_seq_id: int
    pg_id: int
    op_id: int
    profiling_name: str
    state: str
    time_created_ns: int
    time_discovered_started_ns: int
    time_discovered_completed_ns: int
    process_group: tuple[str, str]
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    input_dtypes: list[str]
    output_dtypes: list[str]


class CollectiveAnalyzer(NVRxAttribution[str, dict[str, str]]):
    """Find the ranks that hold a hung job up, from the dumps of all ranks.

    Args:
        args: Mapping or namespace with `fr_path` (directory, file or prefix) and, as needed,
            `pattern` (default `_dump_*`), `rank_regex`, `verbose`, `health_check`,
            `allowed_root` (what leads outside of it is not read), `include_device_lag` (default
            False: the table has only ranks whose program is late; all are in the hanging ranks).
            `llm_analyze`, `model`, `base_url`, `debug` and `threshold` are taken for callers that
            set them; the analysis needs no model.

    Raises:
        ValueError: When it runs and no file could be read.

    Example:
        >>> with CollectiveAnalyzer({"fr_path": "/dumps"}) as analyzer:  # doctest: +SKIP
        ...     result, _ = analyzer.run_sync({})
        >>> result["hanging_ranks"]  # doctest: +SKIP
        'hanging ranks: [3]'
    """

    def __init__(self, args: Any) -> None:
        self._init_config = normalize_attribution_args(args)
        self._loaded = LoadedTraces()
        self._analysis: TraceAnalysis | None = None
        super().__init__(self.preprocess_FR_dumps, self.collective_analysis, self.print_output)

    @property
    def init_config(self) -> dict[str, Any]:
        """A copy of the arguments of the construction."""
        return dict(self._init_config)

    async def preprocess_FR_dumps(self) -> str:  # noqa: N802 - public name
        """Read and analyse the dumps; return the table text.

        Raises:
            ValueError: There is no readable dump.
        """
        config = effective_run_or_init_config(self._init_config)
        path = config.get("fr_path") or self._init_config.get("fr_path")
        if not path:
            raise ValueError("fr_path is not set: give the directory, file or prefix of the dumps")
        pattern = config.get("pattern") or DEFAULT_PATTERN
        import asyncio

        self._loaded = await asyncio.to_thread(
            load_traces,
            str(path),
            pattern,
            rank_regex=config.get("rank_regex"),
            allowed_root=config.get("allowed_root"),
        )
        # Seconds for thousands of ranks: a server's other clients go on.
        analysis = self._analysis = await asyncio.to_thread(analyze_dumps, self._loaded)
        if config.get("verbose"):
            self.print_pg_configs()
            eprint(format_summary(analysis))
        if config.get("health_check"):
            self.print_node_health_status()
        return format_table(
            analysis, include_device_lag=bool(config.get("include_device_lag", False))
        )

    async def collective_analysis(self, text: str) -> str:
        """Return the analysis text; the table of loaded dumps gets a summary in front.

        Args:
            text: The table.
        """
        if not self._loaded.dumps:
            return text
        return format_summary(self._analyzed()) + text

    async def print_output(self, text: str) -> tuple[dict[str, str], AttributionState]:
        """Return the result of the pipeline; a hang never forbids a restart.

        Args:
            text: The analysis text.

        Returns:
            The texts `analysis_text` and `hanging_ranks`, and the state CONTINUE.
        """
        ranks = self._analyzed().guilty_ranks if self._loaded.dumps else []
        return (
            {"analysis_text": text, "hanging_ranks": hanging_ranks_text(ranks)},
            AttributionState.CONTINUE,
        )

    def reply_parts(self, result: dict[str, str], state: AttributionState) -> dict[str, Any]:
        """Return the parts of a service's reply; traces alone give no advice.

        Args:
            result: The texts `analysis_text` and `hanging_ranks`.
            state: Not used.
        """
        del state
        report = self._analyzed().to_dict() if self._loaded.dumps else None
        return {
            "result": result,
            "recommendation": {"action": "UNKNOWN"},
            "report": report,
        }

    def process_file(self, path: str) -> bool:
        """Add one dump; return False if it cannot be read.

        Args:
            path: The dump.
        """
        try:
            found = load_traces(path, rank_regex=r"(\d{1,7})(?=\D*$)").dumps
        except NoTraceError as error:
            eprint(f"{error}")
            return False
        self._loaded.dumps.update(found)
        self._analysis = None
        return True

    def analyze_matches(
        self, verbose: bool = False
    ) -> tuple[dict[str, list[Collective]], dict[str, dict[str, Any]]]:
        """Return (completed, missing).

        Returns:
            Completed: group name -> operations that all members ended. Missing: group name ->
            `{"desc", "op", "size", "dtype", "ranks"}` of the operation that waits for ranks.
        """
        analysis = self._analyzed()
        missing: dict[str, dict[str, Any]] = {}
        for point in analysis.graph.points:
            ranks = sorted(set(analysis.guilty_ranks) & {*point.lagging, *point.here})
            if ranks and not point.op.is_p2p:
                missing[point.group.name] = {
                    "desc": point.group.desc,
                    "op": point.op.name,
                    "size": [list(shape) for shape in point.op.sizes[0]],
                    "dtype": list(point.op.dtypes[0]),
                    "ranks": ranks,
                }
        completed: dict[str, list[Collective]] = {}
        for group in analysis.world.groups:
            for rank, by_seq in sorted(group.by_seq.items()):
                done = [op for ops in by_seq.values() for op in ops if op.is_done]
                completed.setdefault(group.name, []).extend(_collective(rank, op) for op in done)
        if verbose:
            eprint(format_summary(analysis))
        return completed, missing

    def group_pgs(self, missing: dict[str, dict[str, Any]]) -> dict[tuple[int, ...], list[str]]:
        """Return the groups that miss the same ranks: ranks -> group names.

        Args:
            missing: Group name to its row of `analyze_matches`.
        """
        found: dict[tuple[int, ...], list[str]] = {}
        for name, row in missing.items():
            found.setdefault(tuple(row["ranks"]), []).append(name)
        return found

    def print_pg_configs(self) -> None:
        """Write every process group with its members to stderr."""
        for group in self._analyzed().world.groups:
            eprint(plain(f"{group.name} | {group.desc} | {list(group.members)}"))

    def print_node_health_status(self) -> None:
        """Write the health checks that the dumps hold to stderr."""
        for rank, dump in sorted(self._loaded.dumps.items()):
            for name, result in dump.health.items():
                line = (
                    f"rank {rank} {dump.host or ''} {name}: {result['status']} {result['output']}"
                )
                eprint(plain(line))

    def _analyzed(self) -> TraceAnalysis:
        if self._analysis is None:
            self._analysis = analyze_dumps(self._loaded)
        return self._analysis


def eprint(*args: object) -> None:
    """Write to stderr, as one line.

    Args:
        args: The parts of the line, joined by blanks.

    Example:
        >>> import contextlib
        >>> with contextlib.redirect_stderr(sys.stdout):
        ...     eprint("rank", 3)
        rank 3
    """
    write_err(" ".join(map(str, args)).rstrip("\n") + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the program: analyse a directory of dumps and name the ranks that hold the job up.

    Args:
        argv: The arguments without the program's name; None: those of the process.
    """
    parser = argparse.ArgumentParser(description="Name the ranks that hold a hung job up.")
    parser.add_argument("--fr-path", required=True, help="directory, file or prefix of the dumps")
    parser.add_argument("-p", "--pattern", default=DEFAULT_PATTERN, help="files of a directory")
    parser.add_argument("-v", "--verbose", action="store_true", help="show groups and suspects")
    parser.add_argument("-c", "--health-check", action="store_true", help="show health checks")
    parser.add_argument(
        "-l", "--llm-analyze", action="store_true", help="accepted; the analysis needs no model"
    )
    parser.add_argument("-m", "--model", help="accepted; the analysis needs no model")
    parser.add_argument("-b", "--base_url", help="accepted; the analysis needs no model")
    parser.add_argument("--debug", action="store_true", default=bool(os.environ.get("FR_DEBUG")))
    parser.add_argument("--emit-stdout", action="store_true", help="print the table on stdout")
    args = parser.parse_args(argv)
    args.verbose = args.verbose or args.debug
    with CollectiveAnalyzer(args) as analyzer:
        try:
            result, _ = analyzer.run_sync(args)
        except NoTraceError as error:
            eprint(f"error: {error}")
            return _EXIT_UNREADABLE
    text = f"{result['analysis_text']}\n{result['hanging_ranks']}\n"
    if args.emit_stdout:
        write_out(text)
    else:
        write_err(text)
    return 0


def _collective(rank: int, op: Op) -> Collective:
    return Collective(
        *(op.record_id, rank, op.seq, op.p2p_seq, op.pg_id, op.op_id, op.full_name, op.state),
        *(op.created_ns, op.started_ns, op.completed_ns, (op.pg_name, op.pg_desc)),
        *([list(shape) for shape in op.sizes[0]], [list(shape) for shape in op.sizes[1]]),
        *(list(op.dtypes[0]), list(op.dtypes[1])),
    )


if __name__ == "__main__":
    sys.exit(main())
