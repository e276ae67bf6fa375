# SPDX-License-Identifier: Apache-2.0
"""A trainer that is killed, or ends, while a save is under way.

Arguments: SIGKILL, exit or writes, and a path that "writes" writes to.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from failing_files import wait_for_file, write_text

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

writes = sys.argv[1] == "writes"
queue = AsyncCallsQueue(sigterm_timeout=50 if writes else 0.5)
request = (write_text, (sys.argv[2], 5)) if writes else (wait_for_file, ("/nowhere",))
queue.schedule_async_request(AsyncRequest(*request, []))
print(queue.persistent_caller.process.pid, flush=True)
if sys.argv[1] == "SIGKILL":
    time.sleep(1000)
