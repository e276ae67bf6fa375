# SPDX-License-Identifier: Apache-2.0
"""Which threads a process has beside its main thread."""

import threading
import time

SETTLE_LIMIT_S = 60.0


def other_threads() -> list[str]:
    """Return which threads there are beside this one; those that are about to end are waited for.

    The one that stopped the function has done all it had to when the function is entered again.
    """
    deadline = time.monotonic() + SETTLE_LIMIT_S
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    for each in others:
        each.join(max(0.0, deadline - time.monotonic()))
    return sorted(each.name for each in others if each.is_alive())
