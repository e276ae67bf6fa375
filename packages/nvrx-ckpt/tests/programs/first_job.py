# SPDX-License-Identifier: Apache-2.0
"""The first of two jobs in one directory: it saves, says how far it is, and goes on when told to.

Arguments: "dcp" or "local", the directory, and for "dcp" a file that the writer waits for.
"""

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[4] / "tests-support"))

from dcp_saves import request_for, state_of
from failing_files import open_late

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

kind, folder, *go = sys.argv[1:]


def tell(text):
    """Print a line, and wait for one."""
    print(text, flush=True)
    sys.stdin.readline()


if kind == "dcp":
    queue = AsyncCallsQueue()
    writer = FileSystemWriterAsync(
        folder, thread_count=1, open_file=functools.partial(open_late, go[0])
    )
    queue.schedule_async_request(request_for(state_of(1), None, writer=writer))
    tell(queue.persistent_caller.process.pid)
    queue._get_async_caller().wait(queue.async_calls[0], 100)
    tell("written")
    queue.maybe_finalize_async_calls(blocking=True)
    tell("finalised")
    queue.close()
else:
    manager = LocalCheckpointManager(folder)
    manager.save(BasicTensorAwareStateDict({"job": 1}), 5)
    # A child that outlives this process, as a data loader may, does not keep the directory.
    if os.fork():
        tell("saved")
    else:
        sys.stdin.read()
        os._exit(0)  # at once: the end of an interpreter takes seconds on a busy machine
