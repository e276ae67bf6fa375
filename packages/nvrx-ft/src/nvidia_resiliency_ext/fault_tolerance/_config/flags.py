# SPDX-License-Identifier: Apache-2.0
"""The table of all flags of `ft_launcher`; `cli_args.py` reads them.

The flags of options come from the table of options.
"""

from __future__ import annotations

from typing import NamedTuple

from nvidia_resiliency_ext.fault_tolerance._core.errors import DEFAULT_NO_RESTART_EXIT_CODE

from . import syntax, table
from . import values as v

TORCHRUN = "torchrun"
_FT = table.FAULT_TOLERANCE
BACKENDS = ("c10d", "static")
DEPRECATED = "deprecated"
GROUPS = (TORCHRUN, *table.GROUPS, DEPRECATED)


class Flag(NamedTuple):
    """One flag."""

    name: str  # without its leading dashes
    kind: v.Kind | None  # None: a switch, which has no value
    default: object
    group: str  # heading in `--help`
    help: str  # one sentence
    env: bool = False  # `PET_<DEST>` in the environment stands in for it
    short: str = ""  # one letter, for the few that have one
    dest: str = ""  # attribute of the result; empty: the name with underscores
    deprecated: str = ""  # what to do instead; the flag still works
    shown_default: object = None  # in `--help`, where the default is decided elsewhere

    @property
    def attribute(self) -> str:
        """Name in the parsed result."""
        return self.dest or self.name.replace("-", "_")


def _torchrun(
    name: str,
    kind: v.Kind | None,
    default: object,
    help_text: str,
    *,
    env: bool = True,
    short: str = "",
) -> Flag:
    return Flag(name, kind, default, TORCHRUN, help_text, env, short)


# fmt: off
_TORCHRUN_FLAGS = (
    _torchrun("nnodes", syntax.NODES, "1:1",
        "Number of nodes, or the least and the largest number."),
    _torchrun("nproc-per-node", syntax.PROCESSES, "1",
        "Workers on this node: a number, the number of CPUs or GPUs, or auto (GPUs, else CPUs)."),
    _torchrun("rdzv-backend", v.choice(*BACKENDS), "c10d",
        "How nodes meet; static, torchrun's default, is another name for c10d."),
    _torchrun("rdzv-endpoint", syntax.ENDPOINT, "", "Where nodes meet; not needed on one node."),
    _torchrun("rdzv-id", v.TEXT, "none",
        "The job's name, the same on all nodes; a job of one node alone has a random one."),
    _torchrun("rdzv-conf", syntax.CONFIGURATION, "", "Further settings of the rendezvous."),
    _torchrun("standalone", None, False, "One node: take a free endpoint and a random id."),
    _torchrun("max-restarts", v.COUNT, 0, "Restarts of the workers before the job fails."),
    _torchrun("term-timeout", v.SECONDS, 1800.0,
        "Time from SIGTERM to SIGKILL for a worker when the launcher itself was signalled."),
    _torchrun("workers-stop-timeout", v.SECONDS, 15.0,
        "Time from SIGTERM to SIGKILL for a worker when workers are restarted."),
    _torchrun("monitor-interval", v.INTERVAL, 0.3,
        "Taken and checked, without effect: a death is noticed at once."),
    _torchrun("start-method", v.choice("spawn", "fork", "forkserver"), "spawn",
        "Taken and checked, without effect: every worker is a fresh process."),
    _torchrun("role", v.TEXT, "default", "The workers' role."),
    _torchrun("module", None, False, "Run the script as a module, like python -m.", short="m"),
    _torchrun("no-python", None, False, "Run the script itself, without python before it."),
    _torchrun("run-path", None, False, "Run the script with runpy.run_path."),
    _torchrun("log-dir", v.TEXT, None, "Directory for logs and for the record of what happened."),
    _torchrun("redirects", syntax.STREAMS, "0",
        "Write streams to files: 1 stdout, 2 stderr, 3 both, or by local rank (0:1,1:3).",
        short="r"),
    _torchrun("tee", syntax.STREAMS, "0",
        "Write streams to files and to the console; values as for --redirects.", short="t"),
    _torchrun("local-ranks-filter", syntax.RANKS, "",
        "Local ranks whose streams the console shows."),
    _torchrun("node-rank", v.COUNT, 0, "Order of this node where no scheduler gives one."),
    _torchrun("master-addr", syntax.ADDRESS, "127.0.0.1",
        "Address of rank 0; with several nodes, where they meet if there is no endpoint."),
    _torchrun("master-port", v.integer_in(0, 65535), 29500,
        "Port of rank 0, or of the rendezvous at --master-addr; not given, each cycle has its own."
    ),
    _torchrun("local-addr", v.TEXT, None, "Address of this node."),
    _torchrun("logs-specs", v.TEXT, None,
        "Entry point in group torchrun.logs_specs that says where output goes.", env=False),
    _torchrun("event-log-handler", v.TEXT, "null",
        "Handler of torch that gets starts and ends, as under torchrun."),
    _torchrun("duplicate-stdout-filters", syntax.FILTERS, [],
        "Texts; lines of redirected stdout that hold one are also in a file of their own."),
    _torchrun("duplicate-stderr-filters", syntax.FILTERS, [],
        "Texts; lines of redirected stderr that hold one are also in a file of their own."),
    _torchrun("numa-binding", v.choice(*syntax.NUMA_MODES), None,
        "Bind workers to CPUs near their GPUs: node, socket, exclusive or core-complex.",
        env=False),
    _torchrun("signals-to-handle", syntax.SIGNALS, "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "Signals that the launcher passes to the workers."),
    _torchrun("shutdown-timeout", v.SECONDS, None, "The same as --workers-stop-timeout."),
    _torchrun("virtual-local-rank", None, False,
        "Give every worker LOCAL_RANK 0 and one visible GPU."),
)

_OWN_FLAGS = (
    Flag("version", None, False, _FT, "Show what is installed and leave."),
    Flag("check", None, False, _FT,
        "Look whether the job could run, on all its nodes, and leave; nothing is started."),
    Flag("print-config", None, False, _FT,
        "Show every option with its value and where that comes from, and leave."),
    Flag("print-completion", v.choice("bash", "zsh"), None, _FT,
        "Print what makes a shell complete this command line, and leave."),
    Flag("json", None, False, _FT,
        "Write what --check or --print-config found as one JSON object."),
    Flag("ft-cfg-path", v.TEXT, None, _FT,
        "YAML file with a section fault_tolerance; flags win over it.", env=True),
    Flag("ft-ignore-missing-cfg", None, False, _FT,
        "Go on with the defaults when the file or its section does not exist."),
    Flag("ft-ignore-unknown-cfg", None, False, _FT,
        "Warn about unknown keys in the file instead of leaving with exit code 2."),
    Flag("ft-restart-policy", table.RESTART_POLICY, "any-failed", _FT,
        "When workers are restarted: after any failure, or when too few nodes are healthy."),
    Flag("ft-rdzv-impl", v.choice("barrier", "legacy"), "barrier", _FT,
        "barrier: as many nodes as needed work, the others are spares. legacy: all that come work."
    ),
    Flag("ft-no-restart-exit-code", v.integer_in(1, 255), DEFAULT_NO_RESTART_EXIT_CODE, _FT,
        "Exit code of a job that must not be started again."),
    Flag("ft-node-health-check-endpoint", v.TEXT, None, table.HEALTH,
        "Unix socket of a service that evaluates this node's health."),
    Flag("ft-per-cycle-applog-prefix", v.ABSOLUTE_PATH, None, table.LOGGING,
        "Write the workers' output to one file per cycle.", env=True),
    Flag("ft-nvrx-logfile", v.ABSOLUTE_PATH, None, table.LOGGING,
        "Write the launchers' output to this file.", env=True),
    Flag("ft-enable-log-server", v.BOOL, False, table.LOGGING,
        "Collect the logs of all nodes on one.", env=True),
    Flag("ft-log-server-port", v.integer_in(1, 65535), 50051, table.LOGGING,
        "First port of the log server.", env=True),
    Flag("ft-log-aggregator-count", v.COUNT, 0, table.LOGGING,
        "Log servers of the first level; 0 takes one per 1536 nodes.", env=True),
    Flag("ft-log-leaf-max-queue-chunks", v.INTEGER, -1, table.LOGGING,
        "Length of a log server's queue; -1 chooses it.", env=True),
    Flag("ft-log-server-log-prefix", v.TEXT, None, table.LOGGING,
        "Prefix of the log servers' own logs.", env=True),
    Flag("ft-log-server-graceful-shutdown-timeout", v.SECONDS, 60.0, table.LOGGING,
        "Longest wait for a log server to write what it has.", env=True),
    Flag("ft-cycle-info-job-id", v.TEXT, None, table.LOGGING,
        "The job in the names of files about cycles, instead of the scheduler's number."),
    Flag("ft-attribution-startup-timeout", v.SECONDS, 20.0, table.ATTRIBUTION,
        "Longest wait for the service to start."),
    Flag("ft-attribution-llm-api-key-file", v.TEXT, None, table.ATTRIBUTION,
        "File with the key of the model endpoint."),
    Flag("ft-attribution-llm-base-url", v.TEXT, None, table.ATTRIBUTION,
        "Address of the model endpoint."),
    Flag("ft-attribution-llm-model", v.TEXT, None, table.ATTRIBUTION, "Name of the model."),
    Flag("ft-attribution-analysis-backend", v.choice("lib", "mcp"), None, table.ATTRIBUTION,
        "Where the analysis runs."),
    Flag("ft-attribution-log-level", v.choice("DEBUG", "INFO", "WARNING"), None, table.ATTRIBUTION,
        "Level of the service's log."),
)

_DEPRECATED_FLAGS = (
    Flag("ft-use-infra-group-rank", v.BOOL, True, DEPRECATED,
        "Whether ranks follow the scheduler's order of nodes; else nodes keep the ranks they had.",
        deprecated=table.INFRA_RANKS),
    Flag("ft-attrsvc-host", v.TEXT, None, DEPRECATED,
        "Host of the attribution service.",
        deprecated="use --ft-attribution-endpoint http://HOST:PORT"),
    Flag("ft-attrsvc-port", v.integer_in(1, 65535), None, DEPRECATED,
        "Port of the attribution service.",
        deprecated="use --ft-attribution-endpoint http://HOST:PORT"),
    Flag("ft-attribution-compute-timeout", v.SECONDS, None, DEPRECATED,
        "Has no meaning any more.", deprecated="it has no meaning any more"),
    Flag("ft-progress-update-interval", v.INTERVAL, None, DEPRECATED,
        "Has no meaning any more.", deprecated="it has no meaning any more"),
)
# fmt: on


def _old_spellings() -> dict[str, str]:
    """Return the flag's present name by each older spelling that is worth a warning."""
    old = {
        "fault-tol-cfg-path": "ft-cfg-path",
        "ignore-missing-fault-tol-cfg": "ft-ignore-missing-cfg",
        "restart-policy": "ft-restart-policy",
        "ft-log-server-log": "ft-log-server-log-prefix",
    }
    for option in table.OPTIONS:
        old["ft-param-" + option.field.replace("_", "-")] = option.flag
        for alias in option.yaml_aliases:
            name = alias.replace("_", "-")
            old["ft-" + name] = old["ft-param-" + name] = option.flag
    return old


FLAGS: tuple[Flag, ...] = (
    *_TORCHRUN_FLAGS,
    *_OWN_FLAGS,
    *(
        Flag(
            *(option.flag, option.kind, None, option.group, option.help),
            dest="ft_" + option.field,
            shown_default=None if option.default in (None, "", {}) else option.default_text,
        )
        for option in table.OPTIONS
    ),
    *_DEPRECATED_FLAGS,
)
OLD_SPELLINGS: dict[str, str] = _old_spellings()
# Present spellings beside the name; they need no warning.
OTHER_SPELLINGS: dict[str, str] = {
    option.plain_flag: option.flag for option in table.OPTIONS if option.flag_aliases
}
