# SPDX-License-Identifier: Apache-2.0
"""Owns a rank's session with its monitor and its timeouts; the calls of every step are `hotpath`.

Importing it is cheap: what only a session needs is loaded by `init_workload_monitoring`. One client
per process. After a fork the child's copy refuses every call: it shares the parent's slot and
connection, and using them would corrupt the parent's session.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from nvidia_resiliency_ext.fault_tolerance.data import (
    FT_LAUNCHER_IPC_SOCKET_ENV_VAR,
    FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR,
    HeartbeatTimeouts,
    RankInfo,
    SectionTimeouts,
    WorkloadControlRequest,
)

from . import timeouts_state
from .errors import RankMonitorClientError
from .hotpath import HotPath, training_iteration
from .slot import NO_ITERATION, W_SESSION_ID, SlotError, SlotLayout, SlotMemory, SlotWriter

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Mapping

    from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
    from nvidia_resiliency_ext.fault_tolerance.ipc_connector import IpcConnector
    from nvidia_resiliency_ext.fault_tolerance.timeouts_calc import TimeoutsCalc

    from .link import RankLink
    from .rank_messages import Accepted, Hello

__all__ = ["RankMonitorClient", "RankMonitorClientError"]

ANSWER_LIMIT_S = 30.0
DUMP_SIGNAL = signal.SIGRTMIN + 5
"""Makes the rank write the stacks of its threads into the monitor's pipe."""


class RankMonitorClient(HotPath):
    """What a training script holds of its monitor.

    Heartbeats and sections are stores into shared memory; the monitor reads them when a limit is
    due. If the monitor dies, training goes on and a new monitor at the same path is found in the
    background, unless the configuration says `monitor_loss=fatal`. Calls from several threads are
    safe; the two `calculate_and_set_*` calls are collective.

    Example:
        >>> client = RankMonitorClient()
        >>> client.init_workload_monitoring()  # doctest: +SKIP
        >>> with client.section("step"):  # doctest: +SKIP
        ...     train_step()
    """

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"

    def __init__(self) -> None:
        """Connect to nothing yet."""
        super().__init__()
        self.logger = logging.getLogger("nvrx")
        self.is_initialized = False
        self.rank_info: RankInfo | None = None
        self.cfg: FaultToleranceConfig | None = None
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self.loaded_hb_timeouts: HeartbeatTimeouts | None = None
        self.loaded_section_timeouts: SectionTimeouts | None = None
        self.iter_idx = 0
        self.chkpt_manager: object | None = None
        self.launcher_connector = self._make_launcher_connector()
        self._calc: TimeoutsCalc | None = None
        self._link: RankLink | None = None
        self._memory: SlotMemory | None = None
        self._dump_fd = -1
        self._may_dump = False
        self._num_warmup_iters: int | None = None
        self._refusal: str | None = None
        self._is_foreign = False
        self._own_limits: dict[str, Any] = {}
        _CLIENTS.add(self)

    @property
    def timeouts_calc(self) -> TimeoutsCalc | None:
        """What was measured so far, up to date; None before the first session."""
        if self._calc is not None:
            self._flush(self._calc)
        return self._calc

    @property
    def rank_monitor_socket(self) -> socket.socket | None:
        """The connection to the monitor, None while there is none."""
        return None if self._link is None else self._link.sock

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Open the session with this rank's monitor.

        Args:
            num_warmup_iters: Iterations during which the timeout `warmup` stands in for `step`;
                the configured number if None.

        Raises:
            RankMonitorClientError: There is a session already, the environment names no monitor,
                or the monitor cannot be reached or refuses.
            RuntimeError: This process's rank is unknown.
        """
        from .link import LinkError, RankLink

        self._check_process()
        if self.is_initialized:
            raise RankMonitorClientError("the rank monitor client is initialised already")
        path = os.environ.get(FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR)
        if not path:
            raise RankMonitorClientError(
                f"{FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR} is not set: start the program with"
                " ft_launcher"
            )
        self.rank_info = RankInfo.get_for_current_rank()
        self._num_warmup_iters = num_warmup_iters
        self._refusal = None
        # A program that uses the signal itself keeps it, and the monitor does without stacks.
        self._may_dump = signal.getsignal(DUMP_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN, None)
        link = RankLink(
            path,
            make_hello=self._make_hello,
            take=self._take_session,
            on_lost=self._on_lost,
            on_restored=self._on_restored,
        )
        self._link = link
        try:
            link.open()
        except LinkError as exc:
            self._release()
            raise RankMonitorClientError(str(exc)) from exc
        self.is_initialized = True
        if self.cfg is not None and self.cfg.install_exception_hook:
            from nvidia_resiliency_ext.fault_tolerance.utils import install_exception_handler

            install_exception_handler()
        self._apply_loaded()

    def shutdown_workload_monitoring(self) -> None:
        """End the session; harmless without one, never collective, and waits for no peer."""
        self._check_process()
        if self.is_initialized:
            # A checkpoint written after the end, and a later session, go on from these.
            calculated = timeouts_state.write_state(self.hb_timeouts, self.section_timeouts)
            self.loaded_hb_timeouts, self.loaded_section_timeouts = timeouts_state.read_state(
                calculated
            )
            self.is_initialized = False
            self._release()

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Set heartbeat timeouts from the longest intervals of all ranks; collective.

        Args:
            skip_if_not_ready: Return False when too few heartbeats were seen, instead of raising.

        Returns:
            Whether the timeouts were set, here and in the monitor.

        Raises:
            RankMonitorClientError: Not initialised, or too few heartbeats were seen.
            TimeoutsCalcError: There is no process group.
        """
        calc = self._synchronized_calc(counts_outside=False)
        if not calc.can_get_hb_timeouts():
            return self._not_ready("heartbeats", skip_if_not_ready=skip_if_not_ready)
        self.hb_timeouts = calc.get_hb_timeouts(self.hb_timeouts)
        self._tell_limits(timeouts_state.limits_of(heartbeat=self.hb_timeouts))
        return True

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Set section timeouts from the longest durations of all ranks; collective.

        Args:
            selected_sections: Sections to set; all if None. As in `start_section`, names that
                the configuration does not have are ignored.
            calc_out_of_section: Whether to set the timeout of the time outside sections, too.
            skip_if_not_ready: Return False when something was not measured, instead of raising.

        Returns:
            Whether the timeouts were set, here and in the monitor.

        Raises:
            RankMonitorClientError: Not initialised, or something was not measured.
            TimeoutsCalcError: There is no process group.
        """
        calc = self._synchronized_calc(counts_outside=calc_out_of_section)
        if selected_sections is not None:
            known = self.section_timeouts.section if self.section_timeouts else {}
            selected_sections = [name for name in selected_sections if name in known]
        if not calc.can_get_section_timeouts(selected_sections, calc_out_of_section):
            return self._not_ready("sections", skip_if_not_ready=skip_if_not_ready)
        self.section_timeouts = calc.get_section_timeouts(
            selected_sections, calc_out_of_section, self.section_timeouts
        )
        self._tell_limits(timeouts_state.limits_of(section=self.section_timeouts))
        return True

    def state_dict(self) -> Mapping[str, Any]:
        """Return the calculated timeouts for a checkpoint; JSON-clean and equal on all ranks."""
        self._check_process()
        state = timeouts_state.write_state(
            self.hb_timeouts if self.is_initialized else self.loaded_hb_timeouts,
            self.section_timeouts if self.is_initialized else self.loaded_section_timeouts,
        )
        return {self.CURRENT_TIMEOUTS_STATE_KEY: state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take timeouts out of a checkpoint; in a session they count at once.

        Args:
            state: What `state_dict` returned.
        """
        self._check_process()
        current = state.get(self.CURRENT_TIMEOUTS_STATE_KEY) or {}
        self.loaded_hb_timeouts, self.loaded_section_timeouts = timeouts_state.read_state(current)
        if self.is_initialized:
            self._apply_loaded()

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Ask the launcher to exclude this node or to end the job, before the next rendezvous.

        Raises:
            RuntimeError: The environment names no launcher.
        """
        self._check_process()
        if self.launcher_connector is None:
            raise RuntimeError(
                f"{FT_LAUNCHER_IPC_SOCKET_ENV_VAR} is not set: there is no launcher to ask"
            )
        info = self.rank_info or RankInfo.get_for_current_rank()
        self.launcher_connector.send((info.global_rank, req))

    def _make_launcher_connector(self) -> IpcConnector | None:
        path = os.environ.get(FT_LAUNCHER_IPC_SOCKET_ENV_VAR)
        if not path:
            self.logger.debug("%s is not set", FT_LAUNCHER_IPC_SOCKET_ENV_VAR)
            return None
        from nvidia_resiliency_ext.fault_tolerance.ipc_connector import IpcConnector

        return IpcConnector(path)

    def _check_process(self) -> None:
        if self._is_foreign:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise RankMonitorClientError(
            self._refusal
            or "the rank monitor client is not initialised: call init_workload_monitoring first"
        )

    def _ask(self) -> None:
        from .rank_messages import Ask

        link = self._link
        if link is not None and link.request(Ask, ANSWER_LIMIT_S) is None and self._words is None:
            self._refuse()

    def _post(self, message: object) -> None:
        if self._link is not None:
            self._link.post(message)

    def _make_hello(self) -> tuple[Hello, list[int]]:
        from .rank_messages import Hello

        info = self.rank_info
        assert info is not None
        handed = [] if self._memory is None else [self._memory.fd]
        hello = Hello(
            rank=info.global_rank,
            pid=info.pid,
            num_warmup_iters=self._num_warmup_iters,
            dump_signal=int(DUMP_SIGNAL) if self._may_dump else 0,
            hands_back_slot=bool(handed),
        )
        return hello, handed

    def _take_session(self, accepted: Accepted, fds: list[int]) -> None:
        from .link import LinkError

        slot_fd, dump_fd = fds
        try:
            if self._memory is None:
                self._begin_session(accepted, slot_fd)
            else:
                self._resume_session(accepted, slot_fd)
        except (SlotError, ValueError) as exc:
            os.close(slot_fd)
            os.close(dump_fd)
            raise LinkError(f"the rank monitor's offer is of no use: {exc}") from exc
        self._register_dump(dump_fd)

    def _begin_session(self, accepted: Accepted, slot_fd: int) -> None:
        from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
        from nvidia_resiliency_ext.fault_tolerance.timeouts_calc import TimeoutsCalc

        cfg = FaultToleranceConfig.from_dict(accepted.config)
        layout = SlotLayout(tuple(accepted.sections))
        memory = SlotMemory.adopt(slot_fd, layout, must_be_sealed=False)
        self.cfg = cfg
        self.hb_timeouts = HeartbeatTimeouts(
            cfg.initial_rank_heartbeat_timeout, cfg.rank_heartbeat_timeout, were_calculated=False
        )
        self.section_timeouts = SectionTimeouts(
            dict(cfg.rank_section_timeouts), cfg.rank_out_of_section_timeout
        )
        self._own_limits = {}
        self._memory = memory
        began = self._begin(
            memory.words, layout.sections, is_answered=not cfg.skip_section_response
        )
        self._calc = TimeoutsCalc(
            sections=layout.sections, start_time=began * 1e-9, safety_factor=cfg.safety_factor
        )
        iteration = training_iteration()
        SlotWriter(memory.words, layout).begin(
            accepted.session_id, began, NO_ITERATION if iteration is None else iteration
        )

    def _resume_session(self, accepted: Accepted, slot_fd: int) -> None:
        """Go on with a new monitor: in the same slot, or in the one that it insists on."""
        memory = self._memory
        assert memory is not None
        if os.path.sameopenfile(slot_fd, memory.fd):
            os.close(slot_fd)
        else:
            fresh = SlotMemory.adopt(slot_fd, memory.layout, must_be_sealed=False)
            for at in range(W_SESSION_ID, memory.layout.words):
                fresh.words[at] = memory.words[at]
            self._memory = fresh
            if self._words is not None:
                self._words = fresh.words
            memory.close()
            memory = fresh
        memory.words[W_SESSION_ID] = accepted.session_id

    def _register_dump(self, dump_fd: int) -> None:
        if self._may_dump:
            faulthandler.register(DUMP_SIGNAL, file=dump_fd, all_threads=True, chain=False)
        previous, self._dump_fd = self._dump_fd, dump_fd
        if previous >= 0:
            os.close(previous)

    def _on_lost(self) -> bool:
        """Take note, in the link's thread, that the monitor is gone; return whether to go on."""
        if self.cfg is not None and self.cfg.monitor_loss == "fatal":
            self._refusal = "the rank monitor is gone, and monitor_loss is fatal"
            self._stop()
            self.logger.error("%s", self._refusal)
            return False
        self.logger.warning(
            "the rank monitor is gone: training goes on, and a new monitor is looked for"
        )
        return True

    def _on_restored(self) -> None:
        """Tell a new monitor, in the link's thread, what the launcher's configuration lacks."""
        from .rank_messages import SetTimeouts

        if self._own_limits:
            self._post(SetTimeouts(0, self._own_limits))

    def _release(self) -> None:
        self._stop()
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._dump_fd >= 0:
            faulthandler.unregister(DUMP_SIGNAL)
            os.close(self._dump_fd)
            self._dump_fd = -1
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _disown(self) -> None:
        """In a forked child: refuse every call from now on, and let go of what is the parent's."""
        self._stop()
        self._is_foreign = True
        self._lock = threading.Lock()  # another thread may have held the parent's at the fork
        self._refusal = (
            "this rank monitor client was inherited through fork: make a client of this process's"
            " own, or use the parent's in the parent"
        )
        link, self._link = self._link, None
        if link is not None:
            link.disown()
        if self._dump_fd >= 0:
            faulthandler.unregister(DUMP_SIGNAL)
            os.close(self._dump_fd)
            self._dump_fd = -1

    def _synchronized_calc(self, *, counts_outside: bool) -> TimeoutsCalc:
        self._check_process()
        calc = self.timeouts_calc
        if not self.is_initialized or calc is None:
            self._refuse()
        if counts_outside:
            calc.maybe_bump_oos_time()
        calc.synchronize_all()
        return calc

    def _not_ready(self, what: str, *, skip_if_not_ready: bool) -> bool:
        if skip_if_not_ready:
            return False
        raise RankMonitorClientError(f"timeouts cannot be calculated: too few {what} were seen")

    def _apply_loaded(self) -> None:
        limits: dict[str, Any] = {}
        if self.loaded_hb_timeouts is not None:
            self.hb_timeouts = self.loaded_hb_timeouts
            limits |= timeouts_state.limits_of(heartbeat=self.hb_timeouts)
        if self.loaded_section_timeouts is not None and self.section_timeouts is not None:
            self.section_timeouts = timeouts_state.only_known(
                self.loaded_section_timeouts, self.section_timeouts
            )
            limits |= timeouts_state.limits_of(section=self.section_timeouts)
        if limits:
            self._tell_limits(limits)

    def _tell_limits(self, limits: Mapping[str, Any]) -> None:
        """Change limits in the monitor; a new monitor will be told again."""
        from .rank_messages import SetTimeouts

        self._own_limits = {**self._own_limits, **limits}
        link = self._link
        assert link is not None
        answer = link.request(lambda number: SetTimeouts(number, dict(limits)), ANSWER_LIMIT_S)
        if answer is None:
            self.logger.warning("the rank monitor did not take the new timeouts yet")
        elif answer.problem is not None:
            raise RankMonitorClientError(f"the rank monitor refused timeouts: {answer.problem}")


_CLIENTS: weakref.WeakSet[RankMonitorClient] = weakref.WeakSet()


def _disown_all() -> None:
    for client in list(_CLIENTS):
        client._disown()  # noqa: SLF001 - the module's own class


os.register_at_fork(after_in_child=_disown_all)
