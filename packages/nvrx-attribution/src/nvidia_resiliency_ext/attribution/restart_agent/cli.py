# SPDX-License-Identifier: Apache-2.0
"""One log, one decision: `python -m nvidia_resiliency_ext.attribution.restart_agent.cli`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from typing import Any

from nvidia_resiliency_ext.attribution.restart_agent.config import (
    CONFIG_SCHEMA,
    RestartAgentRequest,
    config_fingerprint,
    load_restart_agent_config,
    parse_restart_agent_config,
)
from nvidia_resiliency_ext.attribution.restart_agent.runtime import build_restart_agent_runtime
from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, MissingExtraError
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

__all__ = ["build_parser", "main"]

_EXIT_USAGE = 2
_RECORDS_BYTES = 64 << 20


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the program's command line."""
    parser = argparse.ArgumentParser(
        prog="restart_agent", description="Decide whether a job is started again, from its log."
    )
    parser.add_argument("log", metavar="LOG", help="the log")
    parser.add_argument("--job-id", help="the job, for its history")
    parser.add_argument("--cycle-id", type=int, help="which attempt of the job")
    parser.add_argument("--disable-l1", action="store_true", help="ask no model")
    parser.add_argument("--config", metavar="FILE", help="restart_agent_config.v1 as JSON")
    parser.add_argument(
        "--attempt-records-json-in", metavar="FILE", help="earlier attempts, a JSON array"
    )
    parser.add_argument(
        "--attempt-records-json-out", metavar="FILE", help="write all attempts there"
    )
    parser.add_argument("--result-json", metavar="FILE", help="write the response there")
    parser.add_argument(
        "--trace-json", metavar="FILE", help="write there what rules and models said"
    )
    parser.add_argument("--summary", action="store_true", help="print one line, not the response")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: The arguments without the program's name; None: those of the process.

    Returns:
        0 with a decision, 2 for wrong arguments or files.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w") as log:
        ...     _ = log.write("RuntimeError: CUDA error: out of memory")
        ...     log.flush()
        ...     main([log.name, "--disable-l1", "--summary"])  # doctest: +ELLIPSIS
        STOP (workload_unrecoverable): gpu.oom: ...
        0
    """
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except (ConfigError, MissingExtraError, OSError, ValueError) as error:
        write_err(plain(f"restart_agent: {error}") + "\n")
        return _EXIT_USAGE


def _run(args: argparse.Namespace) -> int:
    if args.config is None:
        config = parse_restart_agent_config({"schema_version": CONFIG_SCHEMA})
    else:
        config = load_restart_agent_config(args.config)
    if args.disable_l1:
        config = replace(config, routes={})
    trace: dict[str, Any] = {"config_fingerprint": config_fingerprint(config), "routes": {}}
    request = RestartAgentRequest(os.path.abspath(args.log), args.job_id, args.cycle_id)
    with build_restart_agent_runtime(config) as agent:
        if args.attempt_records_json_in is not None:
            records = json.loads(read_regular_file(args.attempt_records_json_in, _RECORDS_BYTES))
            if not isinstance(records, list):
                raise ConfigError(f"{args.attempt_records_json_in}: must be a JSON array")
            agent.attempt_record_control.seed(records)
        response = agent.analyze(
            request,
            on_deterministic_ready=lambda found: trace.update(deterministic=found),
            on_route_complete=lambda name, found: trace["routes"].update({name: found}),
        )
        _write(args.attempt_records_json_out, agent.attempt_record_control.records())
    _write(args.result_json, response)
    _write(args.trace_json, {**trace, "request": request.to_payload(), "response": response})
    if args.summary:
        text = f"{response['decision']} ({response['decision_basis']}): {response['justification']}"
        write_out(plain(text) + "\n")
    elif args.result_json is None:
        write_out(json.dumps(response, indent=2) + "\n")
    return 0


def _write(path: str | None, value: object) -> None:
    if path is not None:
        atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
