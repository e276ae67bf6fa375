# SPDX-License-Identifier: Apache-2.0
"""The checks of one node: whether what a plan needs is there. Starts and leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import platform
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from nvidia_resiliency_ext.fault_tolerance._agent.preemption import end_of_job
from nvidia_resiliency_ext.fault_tolerance._config import attribution
from nvidia_resiliency_ext.fault_tolerance._core.local_world import count_gpus
from nvidia_resiliency_ext.fault_tolerance._health.admission import NodeChecks
from nvidia_resiliency_ext.fault_tolerance._hosting.attribution import is_installed
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan
from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import read_token
from nvidia_resiliency_ext.fault_tolerance._workers.command import PortReservation
from nvidia_resiliency_ext.shared_utils import doctor
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

# Of what is too long, the first so many of a list are shown, and so many characters of a text.
_MOST_ITEMS = 20
_LEAST_TEXT = 16

Status = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    text: str


def passed(name: str, text: str) -> Finding:
    """Return a finding that stands in nobody's way."""
    return Finding(name, "pass", text)


def failed(name: str, text: str) -> Finding:
    """Return a finding that a person must act on before the job can run."""
    return Finding(name, "fail", text)


def skipped(name: str, text: str) -> Finding:
    """Return a finding that there was nothing to look at."""
    return Finding(name, "skipped", text)


def render(findings: Sequence[Finding], *, as_json: bool) -> str:
    """Return the findings for people, or as one JSON object with the key `checks`."""
    if as_json:
        return json.dumps({"checks": [asdict(finding) for finding in findings]}) + "\n"
    width = max((len(finding.name) for finding in findings), default=0)
    lines = [f"{f.status:<8} {f.name:<{width}}  {' '.join(f.text.split())}" for f in findings]
    return "".join(f"{line}\n" for line in lines)


def json_within(value: object, limit: int) -> str:
    """Return a value as JSON of at most `limit` bytes: long texts and lists are shortened."""
    text, longest = json.dumps(value), limit
    while len(text) > limit and longest > _LEAST_TEXT:
        longest //= 2
        text = json.dumps(_shortened(value, longest))
    return text


def _shortened(value: object, longest: int) -> object:
    if isinstance(value, str) and len(value) > longest:
        return f"{value[:longest]}... ({len(value)} characters)"
    if isinstance(value, Mapping):
        return {key: _shortened(item, longest) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(item, longest) for item in value[:_MOST_ITEMS]]
    return value


def exit_code_of(findings: Sequence[Finding]) -> int:
    """Return 0 when nothing failed, else 1."""
    return int(any(finding.status == "fail" for finding in findings))


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and nvrx-*, which must be the same on all nodes."""
    installed = doctor.installed_versions().items()
    ours = {
        name: version for name, version in installed if name == "torch" or name.startswith("nvrx-")
    }
    return {"python": platform.python_version(), **ours}


def local_findings(plan: LaunchPlan, environ: Mapping[str, str], now: float) -> list[Finding]:
    """Look at everything that a launch of `plan` needs on this node; may take some seconds."""
    text = f"{plan.nproc_per_node} workers of {plan.command.entry}, nodes {plan.min_nodes}"
    text += f" to {plan.max_nodes}" if plan.max_nodes > plan.min_nodes else ""
    return [
        passed("configuration", text),
        *_host(),
        *_ports(plan),
        *_directories(plan, environ),
        *_files(plan, environ, now),
        *_devices(plan, environ),
    ]


def _host() -> Iterator[Finding]:
    for found in doctor.findings():
        note = "" if found.level in ("ok", "info", "error") else f"{found.level}: "
        status: Status = "fail" if found.level == "error" else "pass"
        yield Finding(f"host: {found.topic}", status, f"{note}{found.text}")


def _ports(plan: LaunchPlan) -> Iterator[Finding]:
    if plan.master_port is None:
        yield skipped("master port", "every cycle takes a free one")
    else:
        try:
            PortReservation(plan.master_port).release()
            yield passed("master port", f"{plan.master_port} is free")
        except (NvrxError, OSError) as error:
            yield failed("master port", str(error))
    servers = plan.logs.server
    if servers is not None and plan.max_nodes == 1:
        for port in servers.ports.listen_ports():
            yield _free("log server port", port)
    yield from _attribution(plan)


def _attribution(plan: LaunchPlan) -> Iterator[Finding]:
    name = "attribution service"
    config = plan.attribution
    if not config.is_enabled:
        yield skipped(name, "off")
    elif config.is_managed:
        if plan.max_nodes == 1:
            yield _free("attribution port", attribution.DEFAULT_ATTRIBUTION_PORT)
        where = "this launcher runs it"
        yield passed(name, where) if is_installed() else failed(name, "it is not installed")
    else:
        assert config.client_endpoint is not None, "attribution is on"
        yield _answers(name, config.client_endpoint.endpoint)


def _answers(name: str, url: str) -> Finding:
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    try:
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(5.0)
                probe.connect(parts.path)
        else:
            socket.create_connection((parts.hostname or "", parts.port or 0), 5.0).close()
    except OSError as error:
        return failed(name, f"{url} cannot be reached: {error.strerror or error}")
    return passed(name, f"{url} can be reached")


def _free(name: str, port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else error.strerror
            return failed(name, f"{port}: {why}")
    return passed(name, f"{port} is free")


def _directories(plan: LaunchPlan, environ: Mapping[str, str]) -> Iterator[Finding]:
    wanted = {
        "logs and record": plan.log_dir,
        "record": environ.get("NVRX_EVENT_DIR"),
        "cycle logs": os.path.dirname(plan.logs.applog_prefix or "") or None,
        "launcher's log": os.path.dirname(plan.logs.launcher_log_file or "") or None,
        "cycle information": plan.fault_tol_cfg.cycle_info_dir,
    }
    for what, path in wanted.items():
        if path:
            yield _writable(f"directory: {what}", path)


def _writable(name: str, path: str) -> Finding:
    """Write into a directory, or into the nearest one above it where it could be made."""
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    probe = os.path.join(there, f".nvrx-check-{secrets.token_hex(6)}")
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        return failed(name, f"{path}: {there} cannot be written: {error.strerror}")
    os.close(fd)
    os.unlink(probe)
    note = "" if there == os.path.abspath(path) else ", it will be made"
    return passed(name, f"{path}{note}")


def _files(plan: LaunchPlan, environ: Mapping[str, str], now: float) -> Iterator[Finding]:
    config = plan.fault_tol_cfg
    if config.rdzv_token_file:
        try:
            read_token(config.rdzv_token_file)
            yield passed("file: token", config.rdzv_token_file)
        except NvrxError as error:
            yield failed("file: token", str(error))
    if path := config.checkpoint_iteration_file:
        name = "file: checkpoint iteration"
        is_fine = os.access(path, os.R_OK) or not os.path.exists(path)
        yield passed(name, path) if is_fine else failed(name, f"{path} cannot be read")
    try:
        end = end_of_job(config.preempt_deadline, environ, now)
    except ConfigError as error:
        yield failed("end of the job", str(error))
        return
    if end is None:
        yield skipped("end of the job", "no deadline is known")
    elif end - config.preempt_grace <= now:
        yield failed("end of the job", f"in {end - now:.0f} s, too soon to save and leave")
    else:
        yield passed("end of the job", f"in {end - now:.0f} s")


def _devices(plan: LaunchPlan, environ: Mapping[str, str]) -> Iterator[Finding]:
    gpus = count_gpus(environ)
    if not gpus:
        yield skipped("devices", "no GPU is visible")
    elif gpus < plan.nproc_per_node:
        yield failed("devices", f"{plan.nproc_per_node} workers, but {gpus} GPUs are visible")
    else:
        yield passed("devices", f"{gpus} GPUs for {plan.nproc_per_node} workers")
    results = NodeChecks(plan.fault_tol_cfg, plan.node_health_check_endpoint, environ).run()
    if not results:
        yield skipped("health", "there is nothing to look at")
    for result in results:
        status: Status = {"healthy": "pass", "skipped": "skipped"}.get(result.status, "fail")  # type: ignore[assignment]
        yield Finding(f"health: {result.name}", status, result.reason or "healthy")
