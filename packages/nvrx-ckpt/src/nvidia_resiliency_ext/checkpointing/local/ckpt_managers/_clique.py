# SPDX-License-Identifier: Apache-2.0
"""Exchange addresses and a token with the ranks of a clique, and start this rank's server."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from nvidia_resiliency_ext.checkpointing._shard.directory import RankDirectory, ShardName
from nvidia_resiliency_ext.checkpointing._shard.layout import Manifest
from nvidia_resiliency_ext.checkpointing._shard.peer import Peer
from nvidia_resiliency_ext.checkpointing._shard.peer_server import PeerServer
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.procfs import boot_id

_SIOCGIFADDR = 0x8915
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class PeerLinks:
    """How this rank reaches the others of its clique.

    Attributes:
        server: Takes copies for the others; None if it could not be started.
        peers: The others.
        one_machine: Whether all of them, this one included, are on one machine.
        problem: Why copies cannot be exchanged; empty when nothing speaks against it.
    """

    server: PeerServer | None
    peers: tuple[Peer, ...] = ()
    one_machine: bool = False
    problem: str = ""


def connect_clique(
    group: GroupWrapper,
    directory: RankDirectory,
    may_keep: Callable[[ShardName, Manifest], str],
    timeout_s: float,
) -> PeerLinks:
    """Start the server of this rank and find those of the other ranks of the group.

    All ranks of the group call this together. What fails on one of them is a problem that is
    returned, as an exception would leave the others waiting.
    """
    server, mine = None, None
    token = secrets.token_bytes(_TOKEN_BYTES)
    problem = ""
    try:
        host = own_address()
        server = PeerServer(directory, host, token, may_keep, timeout_s)
        mine = (host, server.port, token.hex(), boot_id() or socket.gethostname())
    except (OSError, ConfigError, RuntimeError) as error:  # the last one: no thread
        problem = f"this rank cannot listen for copies: {error}"
    found = group.all_gather_object(mine)
    entries = [entry for entry in found if entry is not None]
    if len(entries) < len(found):
        return PeerLinks(server, problem=problem)
    hosts = {host_id for _, _, _, host_id in entries}
    loopback = [h for h, _, _, _ in entries if h.startswith("127.") or h == "::1"]
    if len(hosts) > 1 and loopback:
        problem = (
            f"a rank would listen for copies at {loopback[0]}, which other hosts cannot reach; "
            "set GLOO_SOCKET_IFNAME to the network interface that ranks use"
        )
    peers = tuple(
        Peer(rank, host, port, bytes.fromhex(text), timeout_s)
        for rank, (host, port, text, _) in zip(group.ranks, entries, strict=True)
        if rank != group.my_global_rank
    )
    return PeerLinks(server, peers, len(hosts) == 1 and len(entries) > 1, problem)


def own_address() -> str:
    """Return the address at which other ranks reach this host.

    It is that of the interface which `GLOO_SOCKET_IFNAME` names, else the one from which
    `MASTER_ADDR` is reached, else that of the host's name.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return _interface_address(interfaces[0])
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return socket.gethostbyname(socket.gethostname())
    family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the kernel only chooses the route.
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", os.fsencode(name)[:15])
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME names {name!r}, which has no IPv4 address: {error}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
