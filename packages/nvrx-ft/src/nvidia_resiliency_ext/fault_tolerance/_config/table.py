# SPDX-License-Identifier: Apache-2.0
"""The table of all options of fault tolerance; dataclass, YAML keys, flags and docs follow it.

An option's flag is `--ft-` and its field with dashes. The order is the order of the dataclass.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from . import values as v

FAULT_TOLERANCE = "fault tolerance"
HEALTH = "health"
LOGGING = "logging"
ATTRIBUTION = "attribution"
GROUPS = (FAULT_TOLERANCE, HEALTH, LOGGING, ATTRIBUTION)

RESTART_POLICY = v.choice("any-failed", "min-healthy")


class Option(NamedTuple):
    """One option."""

    field: str  # name in the dataclass and in the YAML section
    kind: v.Kind
    default: object
    group: str  # heading in `--help` and in the docs
    help: str  # one sentence
    yaml_aliases: tuple[str, ...] = ()  # older names of the key
    flag_aliases: tuple[str, ...] = ()  # other spellings of the flag, without leading dashes

    @property
    def flag(self) -> str:
        """The flag, without the leading dashes."""
        return self.flag_aliases[0] if self.flag_aliases else self.plain_flag

    @property
    def default_text(self) -> str:
        """The default as one writes it in YAML."""
        if self.default is None or self.default == "":
            return "none" if self.default is None else '""'
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if self.kind is v.LOG_LEVEL:
            return v.log_level_name(self.default)
        return getattr(self.default, "name", None) or str(self.default)

    @property
    def plain_flag(self) -> str:
        """The flag that the rule gives, without the leading dashes."""
        return "ft-" + self.field.replace("_", "-")


# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("workload_check_interval", v.INTERVAL, 5.0, FAULT_TOLERANCE,
        "Longest time between two looks of the monitor at a rank; deadlines wake it earlier."),
    Option("initial_rank_heartbeat_timeout", v.SECONDS_OR_NONE, None, FAULT_TOLERANCE,
        "Longest time from a rank's connection to its first heartbeat."),
    Option("rank_heartbeat_timeout", v.SECONDS_OR_NONE, None, FAULT_TOLERANCE,
        "Longest time between two heartbeats of a rank."),
    Option("rank_section_timeouts", v.SECTIONS, {}, FAULT_TOLERANCE,
        "Sections of the program and the longest time that each may stay open; none is no limit."),
    Option("rank_out_of_section_timeout", v.SECONDS_OR_NONE, None, FAULT_TOLERANCE,
        "Longest time that a rank may spend outside all sections."),
    Option("node_health_check_interval", v.INTERVAL, 5.0, HEALTH,
        "Time between two health checks of the node while the job runs."),
    Option("safety_factor", v.FACTOR, 5.0, FAULT_TOLERANCE,
        "Calculated timeouts are the longest observed time multiplied by this."),
    Option("rank_termination_signal", v.SIGNAL, signal.SIGKILL, FAULT_TOLERANCE,
        "Signal that ends a hung rank."),
    Option("log_level", v.LOG_LEVEL, 20, LOGGING, "Level of the launcher's and the monitor's log."),
    Option("restart_check_interval", v.INTERVAL, 60.0, FAULT_TOLERANCE,
        "Time between two log lines about a restart that is under way (layered restart)."),
    Option("enable_nic_monitor", v.BOOL, False, HEALTH,
        "Watch the links of the network cards while the job runs."),
    Option("enable_nic_healthcheck", v.BOOL, True, HEALTH,
        "Check the links of the network cards before a node joins a rendezvous."),
    Option("enable_dist_storage_healthcheck", v.BOOL, False, HEALTH,
        "Check distributed storage before a node joins a rendezvous."),
    Option("storage_healthcheck_path", v.or_none(v.PATHS), None, HEALTH,
        "Paths that must be readable before a node joins a rendezvous.",
        flag_aliases=("ft-storage-health-check-path",)),
    Option("pci_topo_file", v.or_none(v.TEXT), None, HEALTH,
        "File that says which network card belongs to which GPU."),
    Option("link_down_path_template", v.or_none(v.PATH_TEMPLATE), None, HEALTH,
        "Path of a card's counter of lost links; {nic} stands for its name."),
    Option("link_state_path_template", v.or_none(v.PATH_TEMPLATE), None, HEALTH,
        "Path of a card's link state; {nic} stands for its name."),
    Option("skip_section_response", v.BOOL, True, FAULT_TOLERANCE,
        "Let heartbeats and sections return without asking the monitor for an answer."),
    Option("segment", v.or_none(v.integer_in(1, 1_000_000)), None, FAULT_TOLERANCE,
        "Number of nodes of one network domain that must be taken together."),
    Option("numa_bind_strict", v.BOOL, True, FAULT_TOLERANCE,
        "Bind a worker's memory to its NUMA node, instead of only preferring it."),
    Option("gpu_memory_reclaim_timeout", v.SECONDS, 50.0, HEALTH,
        "Longest wait for a stopped worker's GPU memory to come back; 0 does not wait."),
    Option("gpu_memory_tolerance_mb", v.SIZE_MB, 512.0, HEALTH,
        "GPU memory in use that counts as free."),
    Option("gpu_memory_poll_interval", v.INTERVAL, 2.0, HEALTH,
        "Time between two looks at GPU memory."),
    Option("check_remaining_processes", v.BOOL, False, FAULT_TOLERANCE,
        "Log the processes that outlive the workers which started them."),
    Option("max_no_progress_cycles", v.INTEGER, 3, FAULT_TOLERANCE,
        "Give the job up after this many cycles in a row without progress; 0 or less: never.",
        yaml_aliases=("max_no_progress_restarts",)),
    Option("min_progress_iterations", v.COUNT, 1, FAULT_TOLERANCE,
        "Iterations that a cycle must add to count as progress."),
    Option("checkpoint_iteration_file", v.or_none(v.TEXT), None, FAULT_TOLERANCE,
        "File that holds the iteration of the last checkpoint."),
    Option("install_exception_hook", v.BOOL, False, FAULT_TOLERANCE,
        "Let a rank leave at once on an uncaught exception, without waiting for its threads."),
    Option("num_warmup_iterations", v.COUNT, 5, FAULT_TOLERANCE,
        "Iterations of a session in which the timeout of `warmup` replaces that of `step`."),
    Option("attribution_endpoint", v.or_none(v.TEXT), None, ATTRIBUTION,
        "Service that reads logs and says why a cycle ended: localhost, or its address."),
    Option("attribution_stop_action", v.or_none(v.choice("log", "no-restart")), None, ATTRIBUTION,
        "What follows when attribution says that a restart is useless; by default, log."),
    Option("attribution_export_url", v.or_none(v.TEXT), None, ATTRIBUTION,
        "Address that results of attribution are sent to."),
    Option("cycle_info_dir", v.or_none(v.TEXT), None, LOGGING,
        "Directory for one file about each cycle."),
    Option("prewarm", v.choice("auto", "on", "off"), "auto", FAULT_TOLERANCE,
        "Keep one standby worker per local rank, with its imports done, for the next cycle."),
    Option("prewarm_import", v.MODULES, "", FAULT_TOLERANCE,
        "Modules that a standby worker imports; empty: torch and what DDP needs of it."),
    Option("monitor_mode", v.choice("shared", "per-rank"), "shared", FAULT_TOLERANCE,
        "One monitor process for all local ranks, or one for each."),
    Option("monitor_loss", v.choice("ignore", "fatal"), "ignore", FAULT_TOLERANCE,
        "What a heartbeat does when the monitor is gone: nothing, or raise."),
    Option("orphan_workers", v.choice("kill", "keep"), "kill", FAULT_TOLERANCE,
        "What happens to workers whose launcher died."),
    Option("lease", v.INTERVAL, 5.0, FAULT_TOLERANCE,
        "Time between lease renewals of a node; after three times as long it counts as lost."),
    Option("hang_evidence_timeout", v.SECONDS, 2.0, FAULT_TOLERANCE,
        "Longest wait for the stacks of a hung rank before it is killed; 0 takes none."),
    Option("preempt_signal", v.HANDLED_SIGNAL_OR_NONE, None, FAULT_TOLERANCE,
        "Signal that announces to a launcher that its node must go: ranks save and leave."),
    Option("restart_budget_window", v.or_none(v.INTERVAL), None, FAULT_TOLERANCE,
        "Count only the restarts of the last so many seconds against --max-restarts."),
    Option("rdzv_token_file", v.or_none(v.TEXT), None, FAULT_TOLERANCE,
        "File with the job's token for rendezvous, log server and attribution service."),
    Option("attribution_node_action", v.choice("log", "exclude"), "log", ATTRIBUTION,
        "What follows when attribution names bad nodes: a line in the log, or no place for them."),
    Option("restart_backoff", v.SECONDS, 30.0, FAULT_TOLERANCE,
        "Longest wait before a restart when cycles fail within 10 s without a step; 0 never waits."
    ),
    Option("node_blame_limit", v.COUNT, 3, HEALTH,
        "A node that caused so many restarts works only where there is no spare; 0: no such rule."),
    Option("node_blame_window", v.INTERVAL, 3600.0, HEALTH,
        "How long a failure counts against its node."),
    Option("bad_node_hook", v.or_none(v.COMMAND), None, HEALTH,
        "Command that runs for a bad node, with JSON on its standard input; no shell is used."),
    Option("preempt_deadline", v.MOMENT_OR_NONE, None, FAULT_TOLERANCE,
        "When the job's time is over: slurm, +SECONDS from the launcher's start, or unix seconds."),
    Option("preempt_grace", v.INTERVAL, 120.0, FAULT_TOLERANCE,
        "Time that ranks have to save and leave; with a deadline it begins so long before it."),
    Option("segment_health_check_dir", v.or_none(v.ABSOLUTE_PATH), None, HEALTH,
        "Directory of files by which the scheduler excludes array tasks or jobs before a round."),
    Option("start_failure_limit", v.COUNT, 2, FAULT_TOLERANCE,
        "A job on one node ends when all ranks fail before any step with the same error of the "
        "program (ImportError, SyntaxError, NameError, AttributeError, TypeError) in so many "
        "cycles in a row; 0: such cycles are restarted like others."),
)
# fmt: on

# What is said of the flag and of the key that used to ask for it.
INFRA_RANKS = "ranks follow the scheduler's order of nodes where there is one"

# YAML keys of earlier releases that are no field: how their value is read, and what to do instead.
DEPRECATED_KEYS: dict[str, tuple[v.Kind, str]] = {
    "attrsvc_host": (v.TEXT, "use attribution_endpoint: http://HOST:PORT"),
    "attrsvc_port": (v.integer_in(1, 65535), "use attribution_endpoint: http://HOST:PORT"),
    "use_infra_group_rank": (v.BOOL, INFRA_RANKS),
    "progress_update_interval": (v.INTERVAL, "it has no meaning any more"),
    "restart_policy": (RESTART_POLICY, "use the flag --ft-restart-policy"),
}

OPTION_OF_KEY: dict[str, Option] = {
    key: option for option in OPTIONS for key in (option.field, *option.yaml_aliases)
}
