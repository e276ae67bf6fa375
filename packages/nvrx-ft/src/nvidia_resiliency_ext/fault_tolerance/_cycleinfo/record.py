# SPDX-License-Identifier: Apache-2.0
"""What a cycle's file says and what it is called. Pure.

The text is the JSON form of the message `NVRxCycleInfo`, made without protobuf.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

__all__ = ["CycleInfo", "current_name", "file_name", "iso_utc", "short_host_names"]

_LARGEST_ATTEMPT = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class CycleInfo:
    """One cycle, as other programs read it; times are ISO 8601 UTC, lists are Slurm ranges."""

    job_id: str
    attempt_index: int
    cycle_number: int
    cycle_start_time: str = ""
    cycle_end_time: str = ""
    cycle_log_file: str = ""
    active_nodes: str = ""
    standby_nodes: str = ""
    generation: int = 0
    active_ranks: str = ""

    def ended(self, at: str) -> CycleInfo:
        """Return the next version: the cycle is over."""
        return replace(self, cycle_end_time=at, generation=self.generation + 1)

    def to_json(self) -> bytes:
        """Return the file's content; a 64-bit number is a string in protobuf's JSON."""
        fields = {**asdict(self), "generation": str(self.generation)}
        return (json.dumps(fields, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> CycleInfo:
        """Return what a file says.

        Raises:
            ValueError: It is no such file.
        """
        try:
            fields = json.loads(data)
            return cls(**{**fields, "generation": int(fields["generation"])})
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"no cycle information: {error}") from error


def file_name(job_id: str, attempt_index: int, cycle_number: int) -> str:
    """Return the name of a cycle's file."""
    _check_job_id(job_id)
    return f"cycle_info.{job_id}.{attempt_index}.{cycle_number}"


def current_name(job_id: str) -> str:
    """Return the name of the link to the present cycle's file."""
    _check_job_id(job_id)
    return f"cycle_info.{job_id}.current"


def iso_utc(unix_s: float) -> str:
    """Return a time as the files have it."""
    when = datetime.fromtimestamp(unix_s, timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def attempt_of(text: str | None) -> int:
    """Return the number of a scheduler's attempt; what is no number counts as the first."""
    try:
        number = int(text or 0)
    except ValueError:
        return 0
    return number if 0 <= number <= _LARGEST_ATTEMPT else 0


def short_host_names(addresses: list[str]) -> list[str]:
    """Return the first part of each host name; addresses in numbers stay whole."""
    return [one if _is_numeric(one) else one.partition(".")[0] for one in addresses]


def _is_numeric(address: str) -> bool:
    return ":" in address or all(part.isdecimal() for part in address.split("."))


def _check_job_id(job_id: str) -> None:
    if "/" in job_id or "\0" in job_id or job_id in (os.curdir, os.pardir):
        raise ValueError(f"the job id {job_id!r} cannot be part of a file name")
