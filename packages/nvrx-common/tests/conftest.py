# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of nvrx-common; first of all, that a test leaves nothing behind."""

from collections.abc import Iterator

import leftovers
import pytest

from nvidia_resiliency_ext.shared_utils.children import pidfd_available

_leaves_nothing_behind = leftovers.guard(
    leftovers.children,
    leftovers.marked_processes,
    leftovers.threads,
    leftovers.descriptors,
    leftovers.run_directories,
    leftovers.shared_memory,
)


@pytest.fixture(params=["pidfd", "no pidfd"])
def each_watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with pidfds and again with what replaces them on kernels without."""
    pidfd_available.cache_clear()
    if request.param == "no pidfd":
        monkeypatch.setenv("NVRX_FORCE_NO_PIDFD", "1")
    elif not pidfd_available():
        pytest.skip("this kernel lets us use no pidfd")
    yield request.param
    pidfd_available.cache_clear()
