# SPDX-License-Identifier: Apache-2.0
"""Program of a worker process: reads dumps named on stdin, writes one JSON line for each.

Memory of the process and CPU time per file are limited: a small pickle can ask for any amount of
either. A file that takes too long ends the process, which the caller notices.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
import sys

from nvidia_resiliency_ext.attribution._traces.exchange import DumpWriter
from nvidia_resiliency_ext.attribution._traces.loading import read_dump
from nvidia_resiliency_ext.attribution._traces.pickles import UnsafePickleError
from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError

_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answer each order with a dump or a finding, in the order of the list."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Its default action ends the process, in the middle of any operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A dump is a tree: counting references frees it, and looking for cycles doubles the time.
    gc.disable()
    orders = json.load(sys.stdin)
    writer = DumpWriter()
    _write({"ready": True})
    for file, rank in orders["jobs"]:
        signal.setitimer(signal.ITIMER_PROF, orders["cpu_s"])
        try:
            dump = read_dump(file, rank, orders["limit_bytes"], orders["allowed_root"])
            answer = writer.row(dump)
        except UnsafePickleError as error:
            answer = {"finding": "unsafe_pickle", "text": str(error)}
        except PathOutsideRootsError as error:
            answer = {"finding": "outside_root", "text": str(error)}
        except (OSError, ValueError, MemoryError) as error:
            answer = {"finding": "unreadable", "text": str(error) or "too large"}
        _write(answer)


def _write(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
