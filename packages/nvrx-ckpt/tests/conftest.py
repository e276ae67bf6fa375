# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of nvrx-ckpt: none leaves anything behind."""

import leftovers

leftovers.open_pipe_of_libuv()

_leaves_nothing_behind = leftovers.guard(
    leftovers.children,
    leftovers.marked_processes,
    leftovers.threads,
    leftovers.descriptors,
    leftovers.shared_memory,
)
