# SPDX-License-Identifier: Apache-2.0
"""A worker that runs a Python function: the launcher's side (`FunctionCall`) and the worker's.

The function travels as multiprocessing's spawn sends it, pickled, and its value comes back so.
Run as `python -m ..._workers.function_worker CALL_FILE RESULT_DIR`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.spawn
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write

CALL_FILE = "call.pickle"


class FunctionCall:
    """A function and its arguments in a file of `directory`, which only this user can write."""

    def __init__(self, directory: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._directory = directory
        self._call_file = os.path.join(directory, CALL_FILE)
        preparation = multiprocessing.spawn.get_preparation_data("worker")
        # The authentication key refuses to be pickled outside a spawn; workers need none.
        preparation.pop("authkey", None)
        payload = pickle.dumps((function, tuple(args)))
        atomic_write(self._call_file, pickle.dumps((preparation, payload)))

    @property
    def argv(self) -> tuple[str, ...]:
        return (sys.executable, "-u", "-m", __name__, self._call_file, self._directory)

    def result(self, rank: int) -> Any:
        """Return the function's result on `rank`; None where it ended its process with 0."""
        try:
            with open(_result_file(self._directory, rank), "rb") as file:
                return pickle.load(file)  # noqa: S301  # our own worker's file in a 0700 directory
        except FileNotFoundError:
            return None


def _result_file(directory: str, rank: int) -> str:
    return os.path.join(directory, f"result-{rank}.pickle")


def main() -> int:
    """Run the function of the call file as this worker; report an exception as `@record` does."""
    call_file, directory = sys.argv[1:3]
    with open(call_file, "rb") as file:
        preparation, payload = pickle.load(file)  # noqa: S301  # as above
    multiprocessing.spawn.prepare(preparation)
    function, args = pickle.loads(payload)  # noqa: S301  # as above
    result_file = _result_file(directory, int(os.environ[_env.RANK]))
    # A cycle before this one may have got as far as returning something.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(result_file)
    try:
        value = pickle.dumps(function(*args))
    except Exception as error:  # noqa: BLE001  # the worker's main: reported, then exit code 1
        traceback.print_exc()
        if error_file := os.environ.get(_env.ERROR_FILE):
            extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
            message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
            atomic_write(error_file, json.dumps({"message": message}).encode())
        return 1
    atomic_write(result_file, value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
