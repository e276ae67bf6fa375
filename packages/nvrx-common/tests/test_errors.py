# SPDX-License-Identifier: Apache-2.0
"""The error tree."""

import pickle

import pytest

from nvidia_resiliency_ext.shared_utils import errors
from nvidia_resiliency_ext.shared_utils.events import EventFileError

EXAMPLES = [
    errors.ConfigError("x"),
    errors.FrameTooLargeError(5, 4),
    errors.UnknownMessageError("Name"),
    errors.PeerRefusedError(1, 2, 3),
    errors.DeadlineExceededError("late"),
    errors.UnsafePathError(40, "a link", "/x"),
    errors.PathOutsideRootsError(1, "outside", "/x"),
    errors.ChildStartError(("prog", "-x"), "no such file"),
    EventFileError("/x/events.jsonl", "is empty"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_survives_a_copy(error: errors.NvrxError) -> None:
    """Every error is an NvrxError, has a message, and keeps its fields when it is copied."""
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(error, errors.NvrxError)
    assert str(copy) == str(error) != ""
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.PeerClosedError, ConnectionError),
        (errors.PeerRefusedError, PermissionError),
        (errors.DeadlineExceededError, TimeoutError),
        (errors.UnsafePathError, OSError),
        (errors.PathOutsideRootsError, ValueError),
    ],
)
def test_error_is_also_the_builtin_that_callers_know(
    error: type[Exception], builtin: type[Exception]
) -> None:
    """Callers that only know the built-in exceptions catch ours too."""
    assert issubclass(error, builtin)
