# SPDX-License-Identifier: Apache-2.0
"""From a plan to the rendezvous of many nodes: who serves the store, and what all must agree on."""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance import _env, rdzv_utils
from nvidia_resiliency_ext.fault_tolerance._config import syntax
from nvidia_resiliency_ext.fault_tolerance._config.table import OPTIONS
from nvidia_resiliency_ext.fault_tolerance._core import infra
from nvidia_resiliency_ext.fault_tolerance._health.admission import injected_failure
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import agreed_on_logs
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan, allows_many_launchers
from nvidia_resiliency_ext.fault_tolerance._rendezvous import agreement, coordinator_loop, keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous import endpoint as endpoints
from nvidia_resiliency_ext.fault_tolerance._rendezvous import store as stores
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.domain import own_domain
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import BlameRules, Budget
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.credentials import is_loopback
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

from .run_files import CycleRecords
from .store_rendezvous import StoreRendezvous, node_identity, own_address

if TYPE_CHECKING:
    from .job import Job

logger = logging.getLogger("nvrx")

JOIN_TIMEOUT_S = 300.0
CONNECT_WAIT_S = 120.0
LAST_CALL_S = 1.0
LEGACY_LAST_CALL_S = 30.0
RETRY_S = 0.5
# Each refusal is proof that nobody can have replaced this node: they must come often enough.
LEASES_BETWEEN_PROBES = 0.2
# While torch connects nobody hears that the machine refuses, and the lease grows old: a node that
# comes back stops at two leases.
SHORTEST_PATIENCE_S = 1.0
# The rendezvous host says it first; a node that comes back must not miss its lease for it.
LOG_TOKEN_WAIT_S = 2.0
LEASES_FOR_LOG_TOKEN = 0.5
LATE_ANSWER_S = 5.0  # A store that is only starting says so sooner.

# Options that may differ from node to node: paths, and what a node does for itself.
_OWN_AFFAIRS = frozenset(
    {
        "log_level", "rdzv_token_file", "checkpoint_iteration_file", "pci_topo_file",
        "link_down_path_template", "link_state_path_template", "storage_healthcheck_path",
        "cycle_info_dir", "attribution_endpoint", "attribution_export_url", "prewarm",
        "prewarm_import", "numa_bind_strict", "bad_node_hook", "segment_health_check_dir",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """Where the nodes meet, with the listening socket when the store is to be served here."""

    host: str
    port: int
    listener: socket.socket | None
    served_at: str = ""

    @property
    def is_here(self) -> bool:
        return self.listener is not None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def where(self) -> str:
        """Describe in words which launcher serves the store, and at which address."""
        if not self.is_here:
            return f"another launcher serves the store at {self.address}"
        return f"this launcher serves the store at {self.address}, on address {self.served_at}"

    @property
    def is_hidden(self) -> bool:
        """Whether other machines cannot come here, though the endpoint's name does not say so."""
        return is_loopback(self.served_at) and not is_loopback(self.host)


def find_endpoint(plan: LaunchPlan) -> StoreEndpoint:
    """Find out whether the store is served here; waits for the name service alone.

    Raises EndpointError or ConfigError.
    """
    host, port = syntax.parse_endpoint(plan.rdzv_endpoint)
    try:
        is_host = rdzv_utils.rdzv_config_get_as_bool(plan.rdzv_configs, "is_host")
    except ValueError as error:
        raise ConfigError(f"--rdzv-conf: {error}") from None
    port = port or endpoints.DEFAULT_PORT
    listener = endpoints.claim(host, port, is_host)
    served_at = "" if listener is None else str(listener.getsockname()[0])
    return StoreEndpoint(host, port, listener, served_at)


def rules_of(plan: LaunchPlan, environ: Mapping[str, str]) -> CoordinatorRules:
    """Return the rules by which the coordinator places nodes and restarts. Raises ConfigError."""
    config, conf = plan.fault_tol_cfg, plan.rdzv_configs
    elastic = agreement.is_elastic(plan.restart_policy, plan.rdzv_impl)
    last_call_s = LEGACY_LAST_CALL_S if elastic else LAST_CALL_S
    try:
        segment = config.segment or rdzv_utils.rdzv_config_get_as_int(conf, "segment")
        group_size = rdzv_utils.rdzv_config_get_as_int(conf, "replacement_group_size")
        if group_size is None:
            group_size = infra.default_replacement_group_size(environ)
        placement = PlacementRules(
            min_nodes=plan.min_nodes,
            max_nodes=plan.max_nodes,
            segment=segment,
            group_size=group_size,
            one_launcher_per_addr=not allows_many_launchers(environ),
            elastic=elastic,
            use_infra_rank=plan.use_infra_group_rank,
        )
        last_call_s = _seconds(conf, "last_call_timeout", last_call_s, or_zero=True)
        timeouts_of(plan)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from None
    return CoordinatorRules(
        placement=placement,
        budget=Budget(plan.max_restarts, config.restart_budget_window),
        blame=BlameRules(config.node_blame_limit, config.node_blame_window),
        lease_s=config.lease,
        last_call_s=last_call_s,
        min_healthy=plan.restart_policy == agreement.MIN_HEALTHY,
        counts_unhealthy=not environ.get(_env.SLURM_ARRAY_TASK_ID),
    )


def timeouts_of(plan: LaunchPlan) -> tuple[float, float]:
    """Return how long a round may take to close, and the store to appear. Raises ConfigError."""
    conf = plan.rdzv_configs
    try:
        join_s = _seconds(conf, "join_timeout", JOIN_TIMEOUT_S)
        return join_s, _seconds(conf, "store_connect_wait_seconds", CONNECT_WAIT_S)
    except ValueError as error:
        raise ConfigError(f"--rdzv-conf: {error}") from None


def _seconds(
    conf: Mapping[str, object], key: str, default: float, *, or_zero: bool = False
) -> float:
    value = rdzv_utils.rdzv_config_get_as_float(conf, key)
    if value is None:
        return default
    if not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        least = ">= 0" if or_zero else "> 0"
        raise ValueError(f"rendezvous setting {key}={value:g} is not a number of seconds {least}")
    return value


def must_agree(plan: LaunchPlan, rules: CoordinatorRules) -> dict[str, str]:
    """Return, by flag, the values that must be equal in all launchers of a job."""
    config = plan.fault_tol_cfg
    agreed = agreement.settings_of(rules)
    agreed["--ft-no-restart-exit-code"] = str(plan.no_restart_exit_code)
    for option in OPTIONS:
        name = f"--{option.flag}"
        if option.field not in _OWN_AFFAIRS and name not in agreed:
            agreed[name] = str(getattr(config, option.field))
    return {**agreed, **agreed_on_logs(plan.logs)}


def make_rendezvous(job: Job, endpoint: StoreEndpoint) -> StoreRendezvous:
    """Start this node's rendezvous, and the store if it is here. Raises ConfigError."""
    plan, environ, services = job.plan, job.environ, job.services
    rules, config = rules_of(plan, environ), plan.fault_tol_cfg
    join_s, limit_s = timeouts_of(plan)
    secret = endpoints.read_token(config.rdzv_token_file) if config.rdzv_token_file else None
    addr = plan.local_addr or own_address(endpoint.host, endpoint.port)
    node, prefix = node_identity(addr), keys.prefix(plan.run_id)
    coordinator: coordinator_loop.CoordinatorThread | None = None
    if endpoint.is_hidden:
        logger.warning(
            "--rdzv-endpoint %s is the loopback address %s on this machine: launchers on others "
            "cannot reach it; use a name or address that means the same on all of them",
            *(endpoint.host, endpoint.served_at),
        )
    logger.info(
        "%s; waiting %g s at most for %d nodes (--rdzv-endpoint, --rdzv-conf join_timeout)",
        *(endpoint.where, join_s, rules.placement.min_nodes),
    )
    if endpoint.listener is not None:
        assert services is not None, "who serves the store runs the rest"
        listener, says = endpoint.listener, {keys.LOG_TOKEN: services.log_token}
        coordinator = coordinator_loop.CoordinatorThread(
            lambda: coordinator_loop.served_store(
                listener,
                endpoint.host,
                endpoint.port,
                prefix,
                secret,
                nodes=rules.placement.max_nodes,
                timeout_s=limit_s,
                says=says,
            ),
            lambda *_: rules,
            partial(
                coordinator_loop.Coordinator,
                me=node,
                clock=job.clock,
                begins=services.begins,
                ended=services.ended,
                on_bad_node=job.bad_node.report,
                denylist=job.denylist,
            ),
        )
        coordinator.start()
    if environ.get(_env.REPLACEMENT_GROUP_ID) and not rules.placement.group_size:
        logger.warning(
            "%s is set without effect: --rdzv-conf replacement_group_size=N says how many nodes "
            "make a group",
            _env.REPLACEMENT_GROUP_ID,
        )
    settings = NodeSettings(
        arrival=Arrival(
            node=node,
            addr=addr,
            host=job.paths.host,
            infra_rank=job.infra_rank,
            group=infra.replacement_group_id(environ) if rules.placement.group_size else None,
            nproc=plan.nproc_per_node,
        ),
        master_port=plan.master_port,
        lease_s=config.lease,
        join_timeout_s=join_s,
        connect_timeout_s=limit_s,
        domain=own_domain if rules.placement.segment else lambda: "none",
        unfit_in=lambda round_: injected_failure(round_, job.infra_rank, job.paths.host, environ),
        must_agree=must_agree(plan, rules),
        where=endpoint.where,
    )
    stop = threading.Event()
    connector = StoreConnector(endpoint, prefix, secret, settings, job.cycles, job.clock, stop)
    return StoreRendezvous(job, settings, connector, coordinator, stop)


@dataclass(slots=True)
class StoreConnector:
    """Connects to the job's store, which may come up later than this launcher."""

    endpoint: StoreEndpoint
    prefix: str
    secret: bytes | None
    settings: NodeSettings
    records: CycleRecords
    clock: Clock
    stop: threading.Event  # Ends the waiting.
    patience_s: float = stores.CALL_TIMEOUT_S  # For the first answer.

    def __call__(self, refused: Callable[[], None]) -> stores.JobStore:
        """Connect within the settings' limit; `refused`: see `wait_until_reachable`."""
        # Asked before the first lease, which it would keep waiting.
        self.settings.domain()
        lease_s, timeout_s = self.settings.lease_s, self.settings.connect_timeout_s
        patience_s, self.patience_s = self.patience_s, max(SHORTEST_PATIENCE_S, lease_s)
        at = (self.endpoint.host, self.endpoint.port)
        longest_s = min(endpoints.LONGEST_PAUSE_S, LEASES_BETWEEN_PROBES * lease_s)
        token_wait_s = min(LOG_TOKEN_WAIT_S, LEASES_FOR_LOG_TOKEN * lease_s)
        deadline = self.clock.monotonic() + timeout_s
        has_warned = False
        while True:
            left_s = deadline - self.clock.monotonic()
            endpoints.wait_until_reachable(
                *at, left_s, self.clock, self.stop, refused, longest_pause_s=longest_s
            )
            began, limit_s = self.clock.monotonic(), max(1.0, left_s)
            try:
                answer_s = min(patience_s, limit_s)
                store = stores.connect(*at, self.prefix, self.secret, limit_s, answer_s)
                _fetch_log_token(store, self.records, token_wait_s)
            except StoreLostError as error:
                now = self.clock.monotonic()
                left_s = deadline - now
                if not has_warned and left_s > 0 and now - began > LATE_ANSWER_S:
                    has_warned = True
                    logger.warning(
                        "no answer from the job's store at %s:%d, tried again for %.0f s at most:"
                        " %s",
                        *(*at, left_s, error),
                    )
                # Whoever listened was not ready, or was a store that is just ending.
                if left_s >= RETRY_S and not self.stop.wait(RETRY_S):
                    continue
                if isinstance(error, stores.NoJobError):
                    raise
                raise StoreLostError(
                    f"--rdzv-endpoint {self.endpoint.address}, tried for {timeout_s:g} s:"
                    f" {error}; is that the port of the first node's launcher, and free for it?"
                ) from None
            return store


def _fetch_log_token(store: stores.JobStore, records: CycleRecords, wait_s: float) -> None:
    """Fetch the coordinator's message about log servers, which precedes its decisions.

    Always read: who has another secret is refused by it before it writes anything itself.
    """
    said = store.wait_for(keys.LOG_TOKEN, wait_s)
    if said is None:
        raise StoreLostError(f"the rendezvous host has not begun within {wait_s:.1f} s")
    if records.asks_for_log_server:
        records.log_server_said(said)
