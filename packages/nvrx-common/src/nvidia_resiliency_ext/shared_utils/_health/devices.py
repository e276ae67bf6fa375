# SPDX-License-Identifier: Apache-2.0
"""Which GPUs does a check look at, and where do they sit? Asks the session, judges nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import settings
from .nvml_errors import NvmlCallError, NvmlError
from .nvml_session import session
from .pci_address import normal_bus_id
from .visible import device_of_rank, full_uuid, visible_devices

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PynvmlMixin", "device_label", "resolve_device", "selected_devices", "whose"]

_MIN_MIG_UUID_LENGTH = len("MIG-") + 36


def selected_devices(device_index: int | None) -> list[int | str]:
    """Return the devices to look at: the one of a local rank, or all of this node.

    Raises:
        NvmlError: The driver cannot say.
    """
    if device_index is None:
        count = session().ask("device_count")
        return list(range(count))
    device = resolve_device(device_index)
    return [] if device is None else [device]


def resolve_device(rank: int) -> int | str | None:
    """Return the device of a local rank; `None` when CUDA_VISIBLE_DEVICES hides all.

    Raises:
        NvmlError: The driver cannot say.
    """
    device = device_of_rank(rank, settings.visible_devices())
    if not isinstance(device, str):
        return device
    ask = session().ask
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


def whose(device_index: int | None) -> str:
    """Return whose devices are looked at, in words."""
    return "all GPUs" if device_index is None else f"local rank {device_index}"


def device_label(device: int | str) -> str:
    """Return how a device is called in messages."""
    return f"GPU {device}"


class PynvmlMixin:
    """What a check, or code beside one, may want to know of the node's GPUs."""

    def check_pynvml_availability(self) -> bool:
        """Return whether there is a driver to ask, and it answers."""
        return _or_none("driver_version") is not None

    def has_device(self, local_rank: int) -> bool | None:
        """Return whether a local rank has a GPU; None if the driver cannot tell.

        Args:
            local_rank: The local rank.
        """
        try:
            device = resolve_device(local_rank)
            if isinstance(device, int):
                count: int = session().ask("device_count")
                return 0 <= device < count
        except NvmlCallError as error:
            return False if error.code == NvmlCallError.NOT_FOUND else None
        except NvmlError:
            return None
        return device is not None

    def get_gpu_pci_mapping(self) -> dict[int, str]:
        """Return the PCI address of each GPU, as `dddd:bb:dd.f`; empty when it cannot be told."""
        mapping = {}
        for index in range(_or_none("device_count") or 0):
            bus_id = normal_bus_id(_or_none("bus_id", index) or "")
            if bus_id is not None:
                mapping[index] = bus_id
        return mapping

    def get_visible_pci_addresses(self, visible: str | None) -> list[str | None]:
        """Return the PCI address of each device that a process sees, by ordinal.

        `None` stands for a device whose address cannot be told, such as one that is not there.

        Args:
            visible: Value of CUDA_VISIBLE_DEVICES, `None` when unset.
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


def _or_none(query: str, *arguments: Any) -> Any:
    ask: Callable[..., Any] = session().ask
    try:
        return ask(query, *arguments)
    except NvmlError:
        return None
