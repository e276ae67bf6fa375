# SPDX-License-Identifier: Apache-2.0
"""Program of a worker process: reads dumps named on stdin, writes one JSON line for each."""

from __future__ import annotations

import json
import resource
import sys

from nvidia_resiliency_ext.attribution._traces.exchange import dump_to_row
from nvidia_resiliency_ext.attribution._traces.loading import read_dump
from nvidia_resiliency_ext.attribution._traces.pickles import (
    UnsafePickleError,
    load_plain_limited,
)

_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answer each order with a dump or a finding, in the order of the list."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_bytes, jobs = json.load(sys.stdin)
    for file, rank in jobs:
        try:
            answer = dump_to_row(read_dump(file, rank, limit_bytes, load_plain_limited))
        except UnsafePickleError as error:
            answer = {"finding": "unsafe_pickle", "text": str(error)}
        except (OSError, ValueError, MemoryError) as error:
            answer = {"finding": "unreadable", "text": str(error) or "too large"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
