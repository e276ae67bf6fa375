# SPDX-License-Identifier: Apache-2.0
"""When a program that fails at its start is not started again, although restarts are left. Pure.

Only errors of the program count, on all ranks and in every cycle; a file, a host or a GPU that is
missing may be there the next time. A job that has done a step, or has run for two minutes, goes on.
"""

from __future__ import annotations

from collections.abc import Collection

PROGRAM_ERRORS = frozenset(
    {
        "AttributeError", "ImportError", "IndentationError", "ModuleNotFoundError", "NameError",
        "SyntaxError", "TabError", "TypeError", "UnboundLocalError",
    }
)  # fmt: skip
# An ImportError with one of these is an error of the machine.
MACHINE_ERRORS = ("cannot open shared object file", "Input/output error", "Stale file handle")
LONGEST_START_S = 120.0
OTHERS_MAY_TAKE_S = 1.0


def is_program_error(message: str | None) -> bool:
    """Return whether an exception, as `Type: text`, is an error of the program itself."""
    return (
        message is not None
        and message.partition(":")[0].strip() in PROGRAM_ERRORS
        and not any(text in message for text in MACHINE_ERRORS)
    )


class StartFailures:
    """Counts cycles in a row in which all ranks failed at their start alike; limit 0: no limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._message = ""
        self._count = 0
        self._has_worked = False
        self._is_evaluated = False

    def counts(self, messages: Collection[str | None], lived_s: float, *, stepped: bool) -> bool:
        """Return whether exits, each `Type: text` or None, may be a start that fails on all."""
        self._record(lived_s, stepped=stepped)
        return (
            self._limit > 0
            and not self._has_worked
            and all(is_program_error(message) for message in messages)
            and len(set(messages)) == 1
        )

    def is_hopeless(
        self, messages: Collection[str | None], workers: int, lived_s: float, *, stepped: bool
    ) -> bool:
        """Count a cycle that has failed, and return whether no further one should follow."""
        self._is_evaluated = True
        if not self.counts(messages, lived_s, stepped=stepped) or len(messages) < workers:
            self._count = 0
            return False
        message = next(iter(messages)) or ""
        self._count = self._count + 1 if message == self._message else 1
        self._message = message
        return self._count >= self._limit

    def cycle_ended(self, lived_s: float, *, stepped: bool) -> None:
        """Record a cycle's end, also of one that `is_hopeless` was not asked about."""
        self._record(lived_s, stepped=stepped)
        if not self._is_evaluated:
            self._count = 0
        self._is_evaluated = False

    def _record(self, lived_s: float, *, stepped: bool) -> None:
        self._has_worked = self._has_worked or stepped or lived_s >= LONGEST_START_S
