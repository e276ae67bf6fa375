# SPDX-License-Identifier: Apache-2.0
"""A trainer that forks a child, which exits while a save is under way.

Arguments: a file that the save makes when it has begun, and one that it waits for.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from failing_files import touch_and_wait

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

begun, go = map(Path, sys.argv[1:])
queue = AsyncCallsQueue(sigterm_timeout=5)
queue.schedule_async_request(AsyncRequest(touch_and_wait, (str(begun), str(go)), []))
while not begun.exists():
    time.sleep(0.01)
child = os.fork()
if child == 0:
    sys.exit()  # with everything that runs at the interpreter's end
os.waitpid(child, 0)  # the save is still under way
go.touch()
print(queue.maybe_finalize_async_calls(blocking=True))
queue.close()
