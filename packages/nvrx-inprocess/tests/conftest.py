# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of nvrx-inprocess: none leaves anything behind."""

import jobs
import leftovers
import pytest

leftovers.open_pipe_of_libuv()

_leaves_nothing_behind = leftovers.guard(
    leftovers.children,
    leftovers.marked_processes,
    leftovers.threads,
    leftovers.descriptors,
    leftovers.run_directories,
    leftovers.shared_memory,
)


@pytest.fixture(scope="session")
def fork_server():
    """Run programs in processes that need not import torch."""
    with jobs.server_of(jobs.TORCH) as server:
        yield server
