# SPDX-License-Identifier: Apache-2.0
"""A session with the driver and the devices of this process."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, StuckError

from . import check
from .check import Finding, PeriodicCheck
from .nvml import (
    DriverHungError,
    NvmlCallError,
    NvmlError,
    NvmlQueries,
    NvmlUnavailableError,
    load_binding,
)
from .pci import normal_bus_id

if TYPE_CHECKING:
    from .nvml_helper import HelperAnswering

lock = threading.RLock()
"""Held for one driver call at a time by the session; others may hold it around calls of theirs."""

_MIN_MIG_UUID_LENGTH = len("MIG-") + 36


class NvmlSession:
    """Asks `NvmlQueries` in a thread per call, or in a helper process in a forked child."""

    def __init__(self, binding: Any = None, *, is_forked: bool = False) -> None:
        self.binding = binding
        self.is_forked = is_forked
        self.was_asked = False
        self._helper: HelperAnswering | None = None
        self._queries: NvmlQueries | None = None
        self._caller = DeadlineCaller()

    def ask(self, query: str, *arguments: Any) -> Any:
        """Return the answer of a method of `NvmlQueries`.

        Raises:
            NvmlUnavailableError: There is nothing to ask.
            NvmlCallError: The driver says no.
            DriverHungError: This call or an earlier one took longer than `NVRX_NVML_TIMEOUT_S`.
        """
        timeout_s = check.nvml_timeout_s()
        held = lock
        if not held.acquire(timeout=timeout_s):
            raise DriverHungError(query, timeout_s)
        try:
            if not self.was_asked:
                if self.binding is None and (self.is_forked or check.nvml_in_helper()):
                    from .nvml_helper import HelperAnswering

                    self._helper = HelperAnswering()
                self.was_asked = True
            # The whole time, however long others took before: it is the driver's, not the queue's.
            if self._helper is not None:
                return self._helper.ask(query, arguments, timeout_s)
            return self._caller.run(query, lambda: self._answer(query, arguments), timeout_s)
        except DriverHungError:
            raise
        except StuckError as error:
            raise DriverHungError(error.what, error.seconds) from error
        finally:
            held.release()

    def close(self) -> None:
        """End a helper; the library itself stays as it is."""
        if self._helper is not None:
            self._helper.close()

    def _answer(self, query: str, arguments: tuple[Any, ...]) -> Any:
        if self._queries is None:
            self._queries = NvmlQueries(load_binding() if self.binding is None else self.binding)
        return self._queries.answer(query, arguments)


_session = NvmlSession()


def ask(query: str, *arguments: Any) -> Any:
    """Ask the present session; see `NvmlSession.ask`."""
    return _session.ask(query, *arguments)


def set_nvml(binding: Any) -> None:
    """Use `binding` in place of the module `pynvml`; None: use the real module again.

    A new session begins, which forgets all earlier readings.
    """
    global _session
    old, _session = _session, NvmlSession(binding, is_forked=_session.is_forked)
    old.close()


def with_pynvml_lock(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func` wrapped so that it holds the lock of driver calls while it runs."""

    @functools.wraps(func)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return func(*args, **kwargs)

    return locked


def _after_fork() -> None:
    # The parent's locks may be held for ever, and its descriptors of the driver are not ours.
    global lock, _session  # noqa: PLW0603 - the names under which they are known
    lock = threading.RLock()
    is_forked = _session.is_forked or _session.was_asked
    _session = NvmlSession(_session.binding, is_forked=is_forked)


os.register_at_fork(after_in_child=_after_fork)


def device_of_rank(rank: int, visible: str | None) -> int | str | None:
    """Return the index or UUID of a local rank's device in CUDA_VISIBLE_DEVICES, None if hidden.

    A rank beyond the list names a device of the node itself: launchers that give each rank its own
    device keep counting ranks over the node.
    """
    if visible is None:
        return rank
    entries = _entries(visible)
    if not entries:
        return None
    return entries[rank] if 0 <= rank < len(entries) else rank


def visible_devices(visible: str | None, present: int) -> list[int | str]:
    """Return the devices that a process sees, by ordinal, as `device_of_rank` names them."""
    if visible is None:
        return list(range(present))
    found: list[int | str] = []
    for entry in _entries(visible):
        if isinstance(entry, int) and entry >= present:
            break
        found.append(entry)
    return found


def full_uuid(shortened: str, uuids: list[str]) -> str | None:
    """Return the only UUID that begins with the text, as CUDA allows; `None` if none or several."""
    found = [uuid for uuid in uuids if uuid.lower().startswith(shortened.lower())]
    return found[0] if len(found) == 1 else None


def _entries(visible: str) -> list[int | str]:
    found: list[int | str] = []
    for text in visible.split(","):
        entry = text.strip()
        if entry.isascii() and entry.isdigit():
            found.append(int(entry[:9]))
        elif entry.upper().startswith(("GPU-", "MIG-")):
            found.append(entry)
        else:
            # CUDA ignores what follows the first entry that makes no sense, such as -1.
            break
    return found


def selected_devices(device_index: int | None) -> list[int | str]:
    """Return the devices to look at: the one of a local rank, or all of this node."""
    if device_index is None:
        return list(range(ask("device_count")))
    device = resolve_device(device_index)
    return [] if device is None else [device]


def resolve_device(rank: int) -> int | str | None:
    """Return the device of a local rank; `None` when CUDA_VISIBLE_DEVICES hides all."""
    device = device_of_rank(rank, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not isinstance(device, str):
        return device
    uuids = [ask("uuid", index) for index in range(ask("device_count"))]
    if device.upper().startswith("MIG-"):
        # The older form, MIG-GPU-<uuid>/<instance>/<instance>, is what the driver gives as well.
        if len(device) >= _MIN_MIG_UUID_LENGTH:
            return device
        uuids = [uuid for index in range(len(uuids)) for uuid in ask("mig_uuids", index)]
    found = full_uuid(device, uuids)
    if found is None:
        raise NvmlCallError("device", NvmlCallError.NOT_FOUND, f"no single device is {device!r}")
    return found


def device_label(device: int | str) -> str:
    return f"GPU {device}"


class PynvmlMixin:
    """Look up the node's GPUs, for health checks."""

    def check_pynvml_availability(self) -> bool:
        """Return whether there is a driver to ask, and it answers."""
        return _or_none("driver_version") is not None

    def has_device(self, local_rank: int) -> bool | None:
        """Return whether `local_rank` has a GPU; None if the driver cannot tell."""
        try:
            device = resolve_device(local_rank)
            if isinstance(device, int):
                count: int = ask("device_count")
                return 0 <= device < count
        except NvmlCallError as error:
            return False if error.code == NvmlCallError.NOT_FOUND else None
        except NvmlError:
            return None
        return device is not None

    def get_gpu_pci_mapping(self) -> dict[int, str]:
        """Return the PCI address of each GPU, as `dddd:bb:dd.f`; empty when it cannot be told."""
        indexes = range(_or_none("device_count") or 0)
        found = {index: normal_bus_id(_or_none("bus_id", index) or "") for index in indexes}
        return {index: bus_id for index, bus_id in found.items() if bus_id is not None}

    def get_visible_pci_addresses(self, visible: str | None) -> list[str | None]:
        """Return the PCI address of each device in `visible`, by ordinal.

        `visible` is the value of CUDA_VISIBLE_DEVICES, `None` when unset. The address is `None` for
        a device whose address cannot be told, such as one that is not there.
        """
        uuids: list[str] = []
        count = _or_none("device_count") or 0
        found = []
        for device in visible_devices(visible, count):
            if isinstance(device, str):
                uuids = uuids or [_or_none("uuid", index) or "" for index in range(count)]
            whole = full_uuid(device, uuids) if isinstance(device, str) else device
            bus_id = None if whole is None else _or_none("bus_id", whole)
            found.append(normal_bus_id(bus_id or ""))
        return found

    def is_gb200_platform(self) -> bool:
        """Return whether this is a GB200 node (a B200 behind x86 processors is none)."""
        name: str = _or_none("name", 0) or ""
        return "GB200" in name.upper().replace("-", " ").split()

    def get_gb200_static_mapping(self) -> dict[int, str]:
        """Return which adapter belongs to which GPU of a GB200 node."""
        return {0: "mlx5_0", 1: "mlx5_1", 2: "mlx5_3", 3: "mlx5_4"}


class DeviceCheck(PeriodicCheck, PynvmlMixin):
    """A check of GPUs.

    Args:
        device_index: Local rank whose GPU is looked at; `None` looks at all of the node.
        interval: Seconds between two looks of `async_check`.
        on_failure: Awaited by `async_check` after an unhealthy look.
    """

    def __init__(
        self,
        device_index: int | None = None,
        interval: float = 60,
        on_failure: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(interval, on_failure)
        self.device_index = device_index
        is_all = device_index is None
        self.component = "all GPUs" if is_all else f"GPU of local rank {device_index}"

    def _examine(self) -> Finding:
        try:
            return self._examine_devices(selected_devices(self.device_index))
        except NvmlUnavailableError as error:
            return Finding("skipped", str(error))
        except NvmlError as error:
            return Finding("unhealthy", str(error))

    def _examine_devices(self, devices: list[int | str]) -> Finding:
        raise NotImplementedError


def _or_none(query: str, *arguments: Any) -> Any:
    try:
        return ask(query, *arguments)
    except NvmlError:
        return None
