# SPDX-License-Identifier: Apache-2.0
"""How many ranks are active."""

import pytest

from nvidia_resiliency_ext.inprocess._ranks.layout import clamp_active, round_down


@pytest.mark.parametrize(
    ("world_size", "active", "maximum", "expected"),
    [
        (8, None, None, 8),
        (8, None, 4, 4),
        (8, None, 9, 8),
        (8, 6, None, 6),
        (8, 6, 7, 6),
        (4, 6, 5, 4),
    ],
)
def test_active_ranks_are_clamped(world_size, active, maximum, expected) -> None:
    """No more are active than live, than an earlier step left active, and than the maximum."""
    assert clamp_active(world_size, active, maximum) == expected


def test_rounding_down_gives_the_largest_multiple() -> None:
    """The result is a multiple of the divisor, fits, and the next multiple would not fit."""
    for world_size in range(20):
        for active in (None, *range(20)):
            for divisor in range(1, 9):
                limit = world_size if active is None else min(active, world_size)
                result = round_down(world_size, active, divisor)
                assert result % divisor == 0
                assert result <= limit < result + divisor
