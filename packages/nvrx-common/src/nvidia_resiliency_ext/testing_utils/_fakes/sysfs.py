# SPDX-License-Identifier: Apache-2.0
"""Makes a folder that looks like the parts of /sys that say where GPUs and adapters sit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FakeSysfs", "fake_sysfs"]


class FakeSysfs:
    """A tree below `root`, for the parameter `sysfs_root` of checks.

    Addresses (`bus_id`, `bridges`, outermost first) are those of PCI, such as `0000:3b:00.0`;
    `name` is an adapter, `port` and `ports` are its ports from 1, `netdev` is a network device.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        for folder in ("bus/pci/devices", "class/infiniband", "devices"):
            os.makedirs(f"{self.root}/{folder}", exist_ok=True)

    def __fspath__(self) -> str:
        """Return the folder, so that the tree itself can be given as `sysfs_root`."""
        return self.root

    def add_device(self, bridges: Sequence[str], bus_id: str) -> str:
        """Add a PCI device below bridges, outermost first; return its folder."""
        domain = (*bridges, bus_id)[0].rpartition(":")[0]
        folder = f"{self.root}/devices/pci{domain}"
        for each in (*bridges, bus_id):
            folder = f"{folder}/{each}"
            os.makedirs(folder, exist_ok=True)
            link = f"{self.root}/bus/pci/devices/{each}"
            if not os.path.islink(link):
                os.symlink(folder, link)
        return folder

    def add_nic(
        self,
        name: str,
        bridges: Sequence[str],
        bus_id: str,
        *,
        ports: Sequence[int] = (1,),
        netdev: str | None = None,
    ) -> None:
        """Add an adapter with active ports and all counters at zero."""
        device = self.add_device(bridges, bus_id)
        folder = f"{self.root}/class/infiniband/{name}"
        os.makedirs(folder)
        os.symlink(device, f"{folder}/device")
        for port in ports:
            self.set_state(name, "4: ACTIVE", port=port)
            self.set_counter(name, "link_downed", 0, port=port)
        if netdev is not None:
            self.set_carrier(name, netdev, has_carrier=True)

    def add_efa(self, name: str, bridges: Sequence[str], bus_id: str) -> None:
        """Add an Elastic Fabric Adapter: one active port, and counters in `hw_counters` alone."""
        self.add_nic(name, bridges, bus_id)
        os.unlink(f"{self.root}/class/infiniband/{name}/ports/1/counters/link_downed")
        os.rmdir(f"{self.root}/class/infiniband/{name}/ports/1/counters")
        for counter in ("rx_bytes", "rx_drops", "rx_pkts", "tx_bytes", "tx_pkts"):
            self.set_counter(name, counter, 0, folder="hw_counters")

    def set_state(self, name: str, state: str, *, port: int = 1) -> None:
        """Set the state of a port.

        Args:
            name: The adapter.
            state: Content of the file, such as `4: ACTIVE`.
            port: The port. Default 1.
        """
        self._write(f"class/infiniband/{name}/ports/{port}/state", state)

    def set_counter(
        self, name: str, counter: str, value: int, *, port: int = 1, folder: str = "counters"
    ) -> None:
        """Set a counter of a port.

        Args:
            name: The adapter.
            counter: Name of the counter.
            value: Its value.
            port: The port. Default 1.
            folder: `counters` (default) or `hw_counters`.
        """
        self._write(f"class/infiniband/{name}/ports/{port}/{folder}/{counter}", str(value))

    def set_carrier(self, name: str, netdev: str, *, has_carrier: bool) -> None:
        """Set whether a network device of an adapter has a carrier.

        Args:
            name: The adapter.
            netdev: The network device.
            has_carrier: Whether it has a carrier.
        """
        self._write(f"class/infiniband/{name}/device/net/{netdev}/carrier", str(int(has_carrier)))

    def remove_nic(self, name: str) -> None:
        """Take an adapter away, as the kernel does when it fails."""
        import shutil

        shutil.rmtree(f"{self.root}/class/infiniband/{name}")

    def set_lustre(self, state: str) -> None:
        """Set the state that Lustre reports.

        Args:
            state: Content of its health file, such as `healthy`.
        """
        self._write("fs/lustre/health_check", state)

    def _write(self, path: str, text: str) -> None:
        target = f"{self.root}/{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii") as file:
            file.write(text + "\n")


def fake_sysfs(
    root: str | os.PathLike[str],
    nics: Mapping[str, str] | None = None,
    gpus: Sequence[str] = (),
) -> FakeSysfs:
    """Make a tree with adapters and GPUs.

    Args:
        root: Folder to make it in.
        nics: Path of each adapter, as PCI addresses from the root port down, joined by ``/``.
        gpus: Path of each GPU, likewise.
    """
    tree = FakeSysfs(root)
    for path in gpus:
        *bridges, bus_id = path.split("/")
        tree.add_device(bridges, bus_id)
    for name, path in (nics or {}).items():
        *bridges, bus_id = path.split("/")
        tree.add_nic(name, bridges, bus_id)
    return tree
