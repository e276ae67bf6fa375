# SPDX-License-Identifier: Apache-2.0
"""The error of the timeout calculation; its public name is `timeouts_calc.TimeoutsCalcError`."""

__all__ = ["TimeoutsCalcError"]


class TimeoutsCalcError(Exception):
    """Timeouts cannot be calculated, or a section event does not fit the ones before it."""
