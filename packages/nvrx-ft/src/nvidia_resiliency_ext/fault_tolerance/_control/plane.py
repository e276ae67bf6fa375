# SPDX-License-Identifier: Apache-2.0
"""The program `nvrx-control`: runs the coordinator of a job and what belongs to it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from nvidia_resiliency_ext.fault_tolerance._core import machine
from nvidia_resiliency_ext.fault_tolerance._core.errors import RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP
from nvidia_resiliency_ext.fault_tolerance._core.machine import ATTRIBUTION, Cause
from nvidia_resiliency_ext.fault_tolerance._health.bad_node import BadNodeHook
from nvidia_resiliency_ext.fault_tolerance._hosting.services import CoordinatorServices, token_file
from nvidia_resiliency_ext.fault_tolerance._rendezvous import (
    agreement,
    coordinator_loop,
    endpoint,
    keys,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Denylist
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import JobStore, load_torch
from nvidia_resiliency_ext.fault_tolerance.cli_args import usage_error
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.console import open_missing_streams, write_err
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, SignalQueue
from nvidia_resiliency_ext.shared_utils.rundir import RunDir, remove_stale_run_dirs

from .plan import CONTROL_FLAGS, PROGRAM, ControlPlan, get_args_parser, plan_of

logger = logging.getLogger("nvrx")

# It starts no workers that would inherit a high limit of open files.
MOST_NODES = 4096
LOOK_S = 1.0
STOP_S = 5.0


class ControlPlane:
    """Serves one job; use it as a context manager. The main thread only.

    Raises ConfigError for an unusable token file, NvrxError for a taken port or unusable directory.
    """

    def __init__(self, plan: ControlPlan, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._environ = environ
        self._clock = SystemClock()
        self._stack = contextlib.ExitStack()
        self._denylist = Denylist()
        self._is_stopped = False
        self._signal = 0
        self._thread: coordinator_loop.CoordinatorThread | None = None
        self._host_name = socket.gethostname()

    def __enter__(self) -> ControlPlane:  # noqa: PYI034  # Self is not in Python 3.10
        try:
            self._build()
        except BaseException as error:
            self._stack.close()
            if isinstance(error, OSError):
                raise NvrxError(f"the job cannot be served: {error}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> int:
        """Serve to the job's end or a signal; return the exit code. Raises NvrxError: it cannot."""
        thread = self._thread
        assert thread is not None
        while not self._is_stopped:
            self._loop.run_once()
        entry, problem = thread.outcome, thread.problem
        if entry is not None:
            what = entry.cause.what if entry.cause else entry.reason
            logger.info("the job is over after %d restarts: %s", entry.round, what)
        elif problem:
            raise NvrxError(problem)
        elif self._signal:
            return 128 + self._signal  # The job goes on: a supervisor must start this again.
        return machine.EXIT_OK

    def _build(self) -> None:
        """Build all parts; each is taken down in the reverse order."""
        plan, stack = self._plan, self._stack
        signals = SignalQueue((signal.SIGTERM, signal.SIGINT))
        stack.callback(signals.close)
        stack.enter_context(signals.installed())
        self._loop = EventLoop(self._clock)
        stack.callback(self._loop.close)
        self._loop.watch(signals.fileno(), lambda: self._signalled(signals.receive()))
        config = plan.services.fault_tol_cfg
        secret = endpoint.read_token(config.rdzv_token_file) if config.rdzv_token_file else None
        # Before anybody can connect: a client in the queue of a port does not learn that no store
        # is there yet, and its lease does not stand still.
        load_torch()
        # Before anything else is touched: where another one serves, this one must do nothing.
        try:
            listener = endpoint.claim(plan.address, plan.port, is_host=True)
        except endpoint.EndpointError as error:
            if plan.address == plan.host:
                raise
            raise endpoint.EndpointError(f"--local-addr {plan.address}: {error}") from None
        assert listener is not None
        stack.callback(listener.close)
        self._services = self._build_services()
        stack.callback(lambda: self._services.close(job_goes_on=not self._is_over()))
        self._capture_streams()
        hook, environ = config.bad_node_hook, self._environ
        self._bad_node = BadNodeHook(hook, environ, job=plan.run_id, host=self._host_name)
        stack.callback(self._bad_node.close)
        self._services.follow_attribution(self._attribution_stops, self._denylist.add)
        stack.callback(lambda: self._services.end_attribution(job_goes_on=not self._is_over()))
        self._build_thread(listener, secret)
        logger.info("%s serves job %r at %s:%d", PROGRAM, plan.run_id, plan.host, plan.port)

    def _build_services(self) -> CoordinatorServices:
        plan = self._plan.services
        job_token, run_dir = plan.fault_tol_cfg.rdzv_token_file, ""
        has_servers = plan.logs.server is not None
        if has_servers and not token_file(self._environ, job_token, run_dir).is_given:
            # What one that was killed has left.
            remove_stale_run_dirs(self._environ)
            run_dir = self._stack.enter_context(RunDir.create("control", self._environ)).path
        self._own_token = token_file(self._environ, job_token, run_dir).path
        return CoordinatorServices(
            *(plan, self._environ, self._loop, self._clock),
            address=self._plan.address,
            host=self._host_name,
            run_dir=run_dir,
            is_shared=True,
        )

    def _capture_streams(self) -> None:
        """Let the program's own output go where that of launchers goes, if that was asked for."""
        logs = self._plan.services.logs
        if logs.launcher_log_file is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._logs.collector import CycleLogs
        from nvidia_resiliency_ext.fault_tolerance._logs.sinks import FunnelSink, endpoint_of

        funnel = None
        if logs.server is not None:
            where = endpoint_of(self._plan.address, logs.server.ports.client_connect_port())
            me = f"{PROGRAM}@{self._host_name}"
            funnel = FunnelSink(where, me, self._own_token)
        own = CycleLogs(logs.launcher_log_file, funnel=funnel)
        self._stack.callback(own.close)
        own.capture_own_streams(logs.launcher_log_file)

    def _build_thread(self, listener: socket.socket, secret: bytes | None) -> None:
        plan = self._plan
        says = {
            keys.LOG_TOKEN: self._services.log_token,
            keys.CONTROL_SETTINGS: agreement.write_settings(PROGRAM, plan.settings),
        }
        self._thread = coordinator_loop.CoordinatorThread(
            lambda: coordinator_loop.served_store(
                listener,
                plan.address,
                plan.port,
                keys.prefix(plan.run_id),
                secret,
                nodes=MOST_NODES,
                timeout_s=LOOK_S,
                says=says,
            ),
            _wait_for_rules,
            partial(
                coordinator_loop.Coordinator,
                me=PROGRAM,
                clock=self._clock,
                is_controlled=True,
                begins=self._services.begins,
                ended=self._services.ended,
                on_bad_node=self._bad_node.report,
                denylist=self._denylist,
            ),
            on_end=lambda: self._loop.post(self._stop),
        )
        self._stack.callback(self._thread.join, STOP_S)
        self._stack.callback(self._thread.stop)
        self._thread.start()

    def _signalled(self, numbers: list[int]) -> None:
        for number in numbers:
            logger.warning("received %s: the launchers go on", signal.Signals(number).name)
            self._signal = number
            self._stop()

    def _stop(self) -> None:
        self._is_stopped = True

    def _is_over(self) -> bool:
        return self._thread is not None and self._thread.outcome is not None

    def _attribution_stops(self, reason: str) -> None:
        what = f"attribution says that a restart is useless: {reason}"
        cause = Cause(ATTRIBUTION, what, host=self._host_name, detected_by="attribution")
        if self._thread is not None:
            self._thread.end_job(RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP, cause)


def _wait_for_rules(store: JobStore, stop: threading.Event) -> CoordinatorRules | None:
    """Wait for the first launcher's settings; return the rules they give. Raises NvrxError."""
    while not stop.is_set():
        text = store.wait_for(keys.SETTINGS, LOOK_S)
        if text is not None:
            settings = agreement.read_settings(text)
            try:
                return agreement.rules_from_settings(settings)
            except ConfigError as error:
                # Nobody gave them to this program.
                raise NvrxError(str(error)) from None
    return None


def run_command_line(argv: Sequence[str] | None) -> int:
    """Serve a job to its end, or until a signal comes; return the exit code. Raises SystemExit."""
    open_missing_streams()
    args = get_args_parser().parse_args(argv)
    try:
        if args.print_config:
            from nvidia_resiliency_ext.fault_tolerance._cli.check import print_config

            return print_config(args, os.environ, CONTROL_FLAGS)
        plan = plan_of(args, os.environ)
    except (ConfigError, OSError) as error:
        usage_error(error, PROGRAM)
    from nvidia_resiliency_ext.shared_utils.log_manager import setup_logger

    setup_logger().setLevel(plan.log_level)
    for text in plan.warnings:
        logger.warning("%s", text)
    try:
        with ControlPlane(plan, os.environ) as plane:
            return plane.run()
    except ConfigError as error:
        usage_error(error, PROGRAM)
    except NvrxError as error:
        write_err(f"{PROGRAM}: error: {' '.join(str(error).split())}\n")
        return machine.EXIT_FAILURE
