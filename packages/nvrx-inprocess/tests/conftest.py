# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of nvrx-inprocess: none leaves anything behind."""

import leftovers
from torch.distributed import TCPStore

# The first store of a process opens a pipe of libuv that stays until its end.
TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)

_leaves_nothing_behind = leftovers.guard(
    leftovers.children,
    leftovers.marked_processes,
    leftovers.threads,
    leftovers.descriptors,
    leftovers.run_directories,
    leftovers.shared_memory,
)
