# SPDX-License-Identifier: Apache-2.0
"""Reads from /sys where PCI devices and InfiniBand adapters sit; the root may be another folder."""

from __future__ import annotations

import os

from .pci_address import natural_key, normal_bus_id

__all__ = ["PciMixin", "adapters", "pci_ancestors"]


def adapters(sysfs_root: str) -> list[str]:
    """Return the names of the InfiniBand, RoCE and EFA adapters."""
    try:
        names = os.listdir(f"{sysfs_root}/class/infiniband")
    except OSError:
        return []
    return sorted(names, key=natural_key)


def pci_ancestors(bus_id: str, sysfs_root: str) -> list[str]:
    """Return the PCI devices above one, nearest first; none when it is not there."""
    device = f"{sysfs_root}/bus/pci/devices/{bus_id}"
    if not os.path.islink(device):
        return []
    above = [normal_bus_id(part) for part in os.path.realpath(device).split("/")[:-1]]
    return [part for part in reversed(above) if part is not None]


class PciMixin:
    """What a check, or code beside one, may want to know of the node's PCI devices."""

    _sysfs_root = "/sys"

    def get_pci_ancestor(self, bus_id: str) -> list[str]:
        """Return the PCI devices above a device, nearest first.

        Args:
            bus_id: Address of the device, such as `0000:3b:00.0`.
        """
        return pci_ancestors(normal_bus_id(bus_id) or "", self._sysfs_root)

    def get_ib_pci_mapping(self) -> dict[str, str]:
        """Return the PCI address of each InfiniBand, RoCE and EFA adapter."""
        mapping = {}
        for name in adapters(self._sysfs_root):
            device = os.path.realpath(f"{self._sysfs_root}/class/infiniband/{name}/device")
            bus_id = normal_bus_id(os.path.basename(device))
            if bus_id is not None:
                mapping[name] = bus_id
        return mapping
