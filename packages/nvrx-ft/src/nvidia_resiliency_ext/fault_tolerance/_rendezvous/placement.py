# SPDX-License-Identifier: Apache-2.0
"""Who trains in a round, with which group rank, and the words for it. Pure.

1. Nodes of unhealthy or incomplete replacement groups are excluded.
2. The others are ordered by infrastructure rank; if one has none, or the job does not use them, by
   identity, and then whoever had a rank keeps it where that is possible.
3. Ranks are given out in blocks: a block is one segment, whose nodes are of one NVLink domain.
   Without segments a block is one rank, and all nodes are of one domain.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nvidia_resiliency_ext.fault_tolerance._core.infra import compact_nodes
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .keys import NodeIdentity
from .records import Arrival


def choose_nodes(
    domains: Sequence[str], earlier_ranks: Sequence[int | None], *, size: int, blocks: int
) -> list[int]:
    """Return the nodes that get a rank, in rank order: `blocks` blocks of `size` ranks.

    A node keeps its earlier rank if its domain keeps the block. Domains that have lost nodes keep
    the blocks with the most survivors; the other blocks go to the domains in order. Holes are
    filled by nodes of the domain.
    """
    # In the order of the domains' first nodes.
    members: dict[str, list[int]] = {}
    for index, domain in enumerate(domains):
        members.setdefault(domain, []).append(index)
    # Who had each rank that still exists; of two that claim one rank the first has it.
    holders: dict[int, int] = {}
    for index, rank in enumerate(earlier_ranks):
        if rank is not None and 0 <= rank < blocks * size:
            holders.setdefault(rank, index)
    free = {domain: len(nodes) // size for domain, nodes in members.items()}
    claims = Counter((rank // size, domains[index]) for rank, index in holders.items())
    homes: dict[int, str] = {}
    for (block, domain), _ in sorted(claims.items(), key=lambda item: (-item[1], item[0])):
        if block not in homes and free[domain]:
            homes[block] = domain
            free[domain] -= 1
    others = (domain for domain in members for _ in range(free[domain]))
    ranks: dict[str, list[int]] = {domain: [] for domain in members}
    for block in range(blocks):
        home = homes[block] if block in homes else next(others)
        ranks[home].extend(range(block * size, (block + 1) * size))
    node_by_rank: dict[int, int] = {}
    for domain, nodes in members.items():
        kept = {
            rank: holders[rank]
            for rank in ranks[domain]
            if rank in holders and domains[holders[rank]] == domain
        }
        holes = [rank for rank in ranks[domain] if rank not in kept]
        # Whoever trained before goes on training, if not at the old rank.
        waiting = sorted(
            set(nodes).difference(kept.values()),
            key=lambda index: (earlier_ranks[index] is None, index),
        )
        node_by_rank |= {**kept, **dict(zip(holes, sorted(waiting[: len(holes)]), strict=True))}
    return [node_by_rank[rank] for rank in range(blocks * size)]


NO_DOMAIN: Final = "none"
_LONGEST_TEXT: Final = 255


class PlacementError(NvrxError):
    """Nodes (identities: `nodes`) can never be placed together; the message says what to do."""

    def __init__(self, message: str, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


def check_texts(node: Arrival) -> None:
    """Raise ValueError for texts that would spoil a log or an order: they come from other nodes."""
    NodeIdentity.parse(node.node)
    for text in (node.addr, node.domain, node.group or ""):
        if len(text) > _LONGEST_TEXT or not text.isprintable():
            raise ValueError(f"{text[:300]!r} of {node.node} is too long or not printable")


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """The job's demands on nodes, the same on all. Raises ValueError: they can never be met."""

    min_nodes: int  # How many nodes train; with `elastic` the fewest.
    max_nodes: int  # With `elastic` the most; more may arrive and stand by.
    segment: int | None = None  # How many consecutive ranks must share an NVLink domain.
    group_size: int | None = None  # How many nodes a replacement group must have to be used.
    one_launcher_per_addr: bool = True  # Whether two nodes with one address are an error.
    elastic: bool = False  # Whether everybody up to `max_nodes` trains.
    use_infra_rank: bool = True  # Whether infrastructure ranks give the order where all are known.

    def __post_init__(self) -> None:
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes must be at least 1, not {self.min_nodes}: see --nnodes")
        if self.max_nodes < self.min_nodes:
            raise ValueError(
                f"max_nodes ({self.max_nodes}) is below min_nodes ({self.min_nodes}):"
                " give --nnodes as MIN:MAX"
            )
        sizes = (("segment", self.segment), ("replacement_group_size", self.group_size))
        for name, value in sizes:
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}; leave it out for none")
        if self.segment is not None and self.min_nodes % self.segment:
            raise ValueError(
                f"segment ({self.segment}) does not divide min_nodes ({self.min_nodes}):"
                " change --ft-segment or the first number of --nnodes"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes that train, spare nodes and excluded nodes."""

    active: tuple[Arrival, ...]  # The index is the group rank.
    spare: tuple[Arrival, ...]  # Numbered on from there, in this order.
    excluded: tuple[Arrival, ...]  # Of unhealthy or incomplete replacement groups; numbered last.
    why_excluded: str = ""  # What is wrong with these groups.

    def without(self, nodes: Collection[Arrival], why: str) -> Placement:
        reasons = [text for text in (self.why_excluded, f"{len(nodes)} {why}") if text]
        return dataclasses.replace(
            self, excluded=(*self.excluded, *nodes), why_excluded=", ".join(reasons)
        )


@dataclass(frozen=True, slots=True)
class NotEnough:
    """The round cannot be closed with the nodes that have arrived."""

    reason: str


def place(
    nodes: Iterable[Arrival], rules: PlacementRules, unhealthy_groups: Collection[str] = frozenset()
) -> Placement | NotEnough:
    """Assign group ranks to active nodes; the order of `nodes` does not matter.

    Raises PlacementError: two nodes claim one place, or a node lacks what segments need.
    """
    everybody = sorted(nodes, key=lambda node: NodeIdentity.parse(node.node))
    _refuse_shared(
        everybody,
        lambda node: node.node,
        "the identity {key} arrived more than once",
        "every launcher needs a node and process of its own: see --local-addr",
    )
    sizes = Counter(node.group for node in everybody)
    usable: list[Arrival] = []
    excluded: list[Arrival] = []
    for node in everybody:
        # A node without a group is a group of its own.
        size = 1 if node.group is None else sizes[node.group]
        is_usable = size >= (rules.group_size or 1) and node.group not in unhealthy_groups
        (usable if is_usable else excluded).append(node)
    _refuse_misfits(usable, rules)
    keeps_ranks = not (rules.use_infra_rank and all(node.infra_rank >= 0 for node in usable))
    if not keeps_ranks:
        infra_rank = operator.attrgetter("infra_rank")
        usable.sort(key=infra_rank)
        excluded.sort(key=infra_rank)
        _refuse_shared(
            usable,
            infra_rank,
            "infrastructure rank {key} is claimed by {nodes}",
            "give each node its own (one srun for the job; CROSS_SLURM_PROCID over several), or"
            " start with --ft-use-infra-group-rank false",
        )
    why = _why_excluded(excluded, rules.group_size, unhealthy_groups)
    # Without segments all nodes are of one domain.
    domains = [NO_DOMAIN if rules.segment is None else node.domain for node in usable]
    per_domain, size = Counter(domains), rules.segment or 1
    most = rules.max_nodes if rules.elastic else rules.min_nodes
    filled = sum(count // size for count in per_domain.values())
    blocks = min(filled, most // size)
    if blocks * size < rules.min_nodes:
        text = f"arrived: {len(everybody)}" + (f", usable: {len(usable)} ({why})" if why else "")
        text += f", needed: {rules.min_nodes} nodes"
        if rules.segment is not None and len(usable) >= rules.min_nodes:
            found = few([f"{domain}: {count}" for domain, count in per_domain.items()])
            text += (
                f", but they fill {filled} of {rules.min_nodes // size} segments of {size}"
                f" (nodes per NVLink domain: {found})"
            )
        return NotEnough(text)
    earlier = [node.previous_rank if keeps_ranks else None for node in usable]
    node_by_rank = choose_nodes(domains, earlier, size=size, blocks=blocks)
    taken = set(node_by_rank)
    return Placement(
        active=tuple(usable[index] for index in node_by_rank),
        spare=tuple(one for index, one in enumerate(usable) if index not in taken),
        excluded=tuple(excluded),
        why_excluded=why,
    )


def _refuse_misfits(nodes: Sequence[Arrival], rules: PlacementRules) -> None:
    if rules.one_launcher_per_addr:
        _refuse_shared(
            nodes,
            lambda node: node.addr,
            "several launchers run on {key}: {nodes}",
            "start one per node (srun --ntasks=$SLURM_NNODES --ntasks-per-node=1), or set"
            " NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE=1 on all nodes if that is meant",
        )
    if rules.segment is not None:
        homeless = tuple(node.node for node in nodes if node.domain in ("", NO_DOMAIN))
        if homeless:
            raise PlacementError(
                f"segments need the NVLink domain of every node, and {few(homeless)} named none:"
                " give all nodes the same --ft-segment, or start without",
                homeless,
            )


def _refuse_shared(
    nodes: Sequence[Arrival], key_of: Callable[[Arrival], Any], what: str, remedy: str
) -> None:
    """Raise PlacementError if two nodes have the same key."""
    by_key: dict[Any, list[str]] = defaultdict(list)
    for node in nodes:
        by_key[key_of(node)].append(node.node)
    shared = {key: names for key, names in by_key.items() if len(names) > 1}
    if not shared:
        return
    faults = [what.format(key=key, nodes=few(names)) for key, names in shared.items()]
    raise PlacementError(
        f"{few(faults, separator='; ')}: {remedy}",
        tuple(name for names in shared.values() for name in names),
    )


def few(texts: Sequence[str], most: int = 8, *, separator: str = ", ") -> str:
    """Return the first texts in one, and how many more there are."""
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def summary(placement: Placement) -> str:
    """Return one line: `4 active: node[001-004]; 1 spare: node007; 1 excluded: node6 (why)`."""
    parts = [
        _count(placement.active, "active"),
        _count(placement.spare, "spare"),
        _count(placement.excluded, "excluded"),
    ]
    why = placement.why_excluded
    return "; ".join(parts) + (f" ({why})" if why else "")


def _why_excluded(
    excluded: Sequence[Arrival], group_size: int | None, unhealthy_groups: Collection[str]
) -> str:
    reasons = []
    for group, size in Counter(node.group for node in excluded).items():
        if group is None:
            nodes = "node has" if size == 1 else "nodes have"
            reasons.append(f"{size} {nodes} no NVRX_REPLACEMENT_GROUP_ID")
        elif group in unhealthy_groups:
            reasons.append(f"group {group} is unhealthy")
        else:
            reasons.append(f"group {group} has {size} of {group_size} nodes")
    return few(reasons)


def _count(nodes: Sequence[Arrival], what: str) -> str:
    names = compact_nodes(node.addr for node in nodes)
    return f"{len(nodes)} {what}" + (f": {names}" if names else "")
