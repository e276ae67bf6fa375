# SPDX-License-Identifier: Apache-2.0
"""Settings of the funnel's servers, and whose a line's prefix is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils._funnel.shared import Access
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

FSYNC_POLICIES = ("never", "interval", "commit")
_LEAST = {
    "flush_bytes": 1,
    "flush_interval_s": 0,
    "completion_idle_s": 0,
    "max_buffered_bytes": 1 << 20,
    "max_files": 1,
    "max_open_files": 1,
    "max_stream_files": 1,
    "max_stream_bytes": 0,
    "stall_s": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunnelOptions:
    """How the root server treats what it gets."""

    allowed_roots: tuple[str, ...] | None  # logs lie below; `None`: anywhere, for use in process
    flush_bytes: int = 1 << 20  # a file with so much waiting, or half its share, is written at once
    flush_interval_s: float = 0.02  # ... and with less, so long after its last write
    completion_idle_s: float = 10.0  # without a chunk, until an old cycle's file is complete
    max_buffered_bytes: int = 32 << 20  # may wait in memory
    max_files: int = 4096  # are in use at one time
    max_open_files: int = 512  # ... of which so many are held open
    max_stream_files: int = 64  # may be named by one stream
    max_stream_bytes: int = 0  # may be sent by one stream; 0: any number
    verify_node_prefix: bool = False  # a rank prefix is of the first node that uses it in a file
    fsync: str = "never"  # or wait for the disk at each `interval` (1 s) or `commit` (answer)
    stall_s: float = 2.0  # a write that takes longer marks its file as stalled

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be a finite number of at least {least}"
            for name, least in _LEAST.items()
            if not least <= getattr(self, name) < math.inf
        ]
        if self.fsync not in FSYNC_POLICIES:
            problems.append(f"fsync={self.fsync!r} must be one of {', '.join(FSYNC_POLICIES)}")
        if problems:
            raise ConfigError("; ".join(problems))


_PREFIX = re.compile(rb"^ *(\d{1,9}): ", re.MULTILINE)


def claim(data: memoryview, node_id: str, owners: dict[bytes, str]) -> tuple[str, str] | None:
    """Note a node's prefixes, unless one is another node's."""
    found = set(_PREFIX.findall(data))
    for prefix in found:
        owner = owners.get(prefix, node_id)
        if owner != node_id:
            return prefix.decode(), owner
    owners.update(dict.fromkeys(found, node_id))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of both servers; `host` may be `unix:PATH`, `grace_s` is from the request to end."""

    host: str
    port: int
    grace_s: float
    access: Access
