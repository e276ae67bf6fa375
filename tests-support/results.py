# SPDX-License-Identifier: Apache-2.0
"""Comparisons of a result: a failure of one counts at once, any other of the same test does not.

A busy machine makes waits fail, never a comparison of weights or of lines that have arrived. So a
test waits first, then compares in `with no_second_try():`. A function that compares has
`@no_second_try()`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNTS = "nvrx_counts_at_once"


@contextlib.contextmanager
def no_second_try() -> Iterator[None]:
    """Give what fails inside the effect of the mark `no_second_try`."""
    try:
        yield
    except Exception as error:
        setattr(error, _COUNTS, True)
        raise


def counts_at_once(error: BaseException) -> bool:
    """Tell whether an error came out of a comparison of a result."""
    return getattr(error, _COUNTS, False)
