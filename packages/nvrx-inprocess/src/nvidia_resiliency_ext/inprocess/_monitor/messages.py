# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks and their monitor, and names of functions in them; values only, no pickle.

Each direction has its own closed set. A rank begins with `Hello`, its page attached; every message
may come twice, after a monitor was replaced. A function that another program calls is named by
module and qualified name; its arguments are plain values.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from nvidia_resiliency_ext.inprocess._protocol.decision import Decision, decode_decision
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.wire import MessageSet

START_LIMIT_S = 10.0
"""How long a rank waits for its monitor."""


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """Times and names of one call of a wrapped function; equal on all ranks.

    `store_factory` is a `module:qualname`, `store_file` its source file, `store_kwargs` the text of
    `dump_kwargs`. `{rank}` is filled in in the absolute paths `log_file` and `pid_file`.
    """

    prefix: str
    store_factory: str
    store_file: str = ""
    store_kwargs: str = "{}"
    log_file: str = ""
    pid_file: str = ""
    interval_s: float = 1.0
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    soft_timeout_s: float = 60.0
    hard_timeout_s: float = 90.0
    barrier_timeout_s: float = 120.0
    last_call_wait_s: float = 1.0
    termination_grace_s: float = 5.0


VERSION = 7
WAITED = "waited"
"""In `Arrived`: the rank waited for its peers, or a collective that failed sent it here."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The rank begins an iteration; `participants` are initial ranks, packed."""

    iteration: int
    rank: int
    world_size: int
    participants: str


@dataclass(frozen=True, slots=True)
class Hello:
    """Connect, for the first time or again; the page and any stack file are attached."""

    version: int
    settings: MonitorSettings
    initial_rank: int
    world_size: int
    begun: Begun | None
    dump_signal: int = 0


@dataclass(frozen=True, slots=True)
class Reported:
    """Something went wrong on the rank."""

    iteration: int
    interruption: Interruption


@dataclass(frozen=True, slots=True)
class Arrived:
    """The rank is ready for the next iteration, and was in this `call` at this `place`."""

    iteration: int
    call: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """The rank leaves the call: lost, discarded by rank assignment, or because it is over.

    The monitor sends it back once it speaks for the rank.
    """

    is_lost: bool
    is_discarded: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the monitor to send this back: the rank has received nothing for a while."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The monitor serves the rank."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The monitor will not serve the rank."""

    text: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Event: the iteration is interrupted, and the last call for faults, of so long, is over."""

    iteration: int
    records: tuple[InterruptionRecord, ...]
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completed:
    """The rank's function has returned; as an event: all ranks have completed the call."""

    iteration: int


@dataclass(frozen=True, slots=True)
class StoreLost:
    """Event: the store is lost, so that no iteration can be decided."""

    text: str


@dataclass(frozen=True, slots=True)
class Decided:
    """Event: the iteration is decided; `text` is the decision's."""

    iteration: int
    text: str

    @property
    def decision(self) -> Decision:
        return decode_decision(self.text)


Event = Interrupted | Completed | Decided | StoreLost
FROM_RANK = MessageSet(
    Hello, MonitorSettings, Begun, Reported, Interruption, Completed, Arrived, Left, Probe
)
TO_RANK = MessageSet(
    Welcome,
    Refused,
    Probe,
    Left,
    Decided,
    Interrupted,
    InterruptionRecord,
    Interruption,
    Completed,
    StoreLost,
)


_MAIN_ALIAS = "__nvrx_main__"
_TAG = "$"


class UnnameableError(NvrxError, TypeError):
    """Another process cannot find a function by its name, or an argument cannot be written."""


def name_of(function: Callable[..., object], what: str = "store_factory") -> tuple[str, str]:
    """Return `module:qualname` of a function or class, and its source file ("" for unknown)."""
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise UnnameableError(
            f"{what} must be a class or function at the top of a module, because the monitor "
            f"imports it by name; {function!r} has none"
        )
    try:
        file = inspect.getsourcefile(sys.modules[module]) or ""
    except (KeyError, TypeError):
        file = ""
    return f"{module}:{qualname}", os.path.abspath(file) if file else ""


def load_named(name: str, file: str = "") -> Callable[..., Any]:
    """Return the function or class that `name_of` named in another process."""
    module_name, _, qualname = name.partition(":")
    found: Any = _load_module(module_name, file)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UnnameableError(f"there is nothing to call under the name {name!r}")
    function: Callable[..., Any] = found
    return function


def dump_kwargs(kwargs: Mapping[str, object], what: str = "store_kwargs") -> str:
    """Return arguments as text: plain values, timedeltas and paths."""
    try:
        return json.dumps(dict(kwargs), default=_to_plain, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UnnameableError(
            f"{what} must be plain values, because they are sent to the monitor as text: {error}"
        ) from error


def load_kwargs(text: str) -> dict[str, Any]:
    kwargs = json.loads(text, object_hook=_from_plain)
    if not isinstance(kwargs, dict):
        raise ValueError("arguments must be a mapping")  # noqa: TRY004 - of the text
    return kwargs


def _to_plain(value: object) -> object:
    if isinstance(value, timedelta):
        return {_TAG: "timedelta", "seconds": value.total_seconds()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a {type(value).__name__} cannot be written down")


def _from_plain(tree: dict[str, Any]) -> object:
    if tree.get(_TAG) == "timedelta" and tree.keys() == {_TAG, "seconds"}:
        return timedelta(seconds=tree["seconds"])
    return tree


def _load_module(name: str, file: str) -> ModuleType:
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ImportError:
            if not file:
                raise
    if not file:
        raise UnnameableError("the main program has no file that could be loaded again")
    # Under another name, so that `if __name__ == "__main__"` is not entered.
    alias = _MAIN_ALIAS if name == "__main__" else name
    if alias in sys.modules:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise UnnameableError(f"{file} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module
