# SPDX-License-Identifier: Apache-2.0
"""The rank's side of the monitor: a session, its calls and its state in a checkpoint."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from . import _env
from ._core.errors import RankMonitorClientError
from ._monitor import slot
from ._monitor.hotpath import HotPath, training_iteration
from .data import HeartbeatTimeouts, RankInfo, SectionTimeouts, WorkloadControlRequest

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Mapping

    from ._monitor.link import RankLink
    from ._monitor.messages import Accepted, Hello
    from .config import FaultToleranceConfig
    from .ipc_connector import IpcConnector
    from .timeouts_calc import TimeoutsCalc

__all__ = ["RankMonitorClient", "RankMonitorClientError"]

ANSWER_LIMIT_S = 30.0
DUMP_SIGNAL = signal.SIGRTMIN + 5  # the rank writes its threads' stacks into the monitor's pipe


class RankMonitorClient(HotPath):
    """A training script's connection to its rank monitor.

    Heartbeats and sections are written to shared memory; the monitor reads them when a timeout may
    have passed. If the monitor dies, training continues, and the client connects to its replacement
    in the background, unless the configuration has `monitor_loss=fatal`. Calls from several threads
    are safe.

    Example:
        >>> client = RankMonitorClient()
        >>> client.init_workload_monitoring()  # doctest: +SKIP
        >>> with client.section("step"):  # doctest: +SKIP
        ...     train_step()
    """

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"

    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.getLogger("nvrx")
        self.is_initialized = False
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self.loaded_hb_timeouts: HeartbeatTimeouts | None = None
        self.loaded_section_timeouts: SectionTimeouts | None = None
        self.rank_info: RankInfo | None = None
        self.cfg: FaultToleranceConfig | None = None
        self.iter_idx = 0
        self.chkpt_manager: object | None = None
        self._calc: TimeoutsCalc | None = None
        self._own_limits: dict[str, Any] = {}
        self._link: RankLink | None = None
        self._memory: slot.SlotMemory | None = None
        self._dump_fd = -1
        self._may_dump = False
        self._num_warmup_iters: int | None = None
        self._monitor_path = ""
        self._refusal: str | None = None
        self._is_foreign = False
        if launcher_path := os.environ.get(_env.FT_LAUNCHER_IPC_SOCKET):
            from .ipc_connector import IpcConnector

            self.launcher_connector: IpcConnector | None = IpcConnector(launcher_path)
        else:
            self.launcher_connector = None
            self.logger.debug("%s is not set", _env.FT_LAUNCHER_IPC_SOCKET)
        _CLIENTS.add(self)

    @property
    def rank_monitor_socket(self) -> socket.socket | None:
        """The connection to the monitor, None without a connection."""
        return None if self._link is None else self._link.sock

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Open the session with this rank's monitor.

        Args:
            num_warmup_iters: Iterations in which the timeout `warmup` replaces that of `step`;
                the configured number if None.

        Raises:
            RankMonitorClientError: This process already has a session, the environment names no
                monitor, or the monitor cannot be reached or refuses the session.
            RuntimeError: This process's rank is unknown.
            TypeError: `num_warmup_iters` is not an integer.
        """
        from ._monitor.link import LinkError, RankLink

        if num_warmup_iters is not None and not isinstance(num_warmup_iters, int):
            raise TypeError(f"num_warmup_iters is a number of iterations, not {num_warmup_iters!r}")
        self._check_process()
        if self.is_initialized:
            raise RankMonitorClientError("the rank monitor client is initialised already")
        path = os.environ.get(_env.FT_RANK_MONITOR_IPC_SOCKET)
        if not path:
            raise RankMonitorClientError(
                f"{_env.FT_RANK_MONITOR_IPC_SOCKET} is not set: start the program with"
                f" ft_launcher, and without {_env.DISABLE_RANK_MONITORS}"
            )
        if any(other._serves(path) for other in list(_CLIENTS)):  # noqa: SLF001 - the module's own class
            raise RankMonitorClientError(
                "another client of this process has the session of this rank: use that one, or"
                " call its shutdown_workload_monitoring first"
            )
        self.rank_info = RankInfo.get_for_current_rank()
        self._monitor_path = path
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
            from .utils import install_exception_handler

            install_exception_handler()
        self._apply_loaded()

    def shutdown_workload_monitoring(self) -> None:
        """End the session, if there is one; not a collective, and waits for no other rank."""
        self._check_process()
        if self.is_initialized:
            # For a checkpoint after the end, and for a later session.
            calculated = _write_state(self.hb_timeouts, self.section_timeouts)
            self.loaded_hb_timeouts, self.loaded_section_timeouts = _read_state(calculated)
            self.is_initialized = False
            self._release()

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Send `req` to the launcher: exclude this node, or end the job, at the next rendezvous.

        Raises:
            RuntimeError: The environment names no launcher.
            TypeError: `req` is not a `WorkloadControlRequest`.
        """
        if not isinstance(req, WorkloadControlRequest):
            raise TypeError(
                "send WorkloadControlRequest(WorkloadAction.ExcludeThisNode, 'why') or"
                f" ShutdownWorkload, not {req!r}"
            )
        self._check_process()
        if self.launcher_connector is None:
            raise RuntimeError(
                f"{_env.FT_LAUNCHER_IPC_SOCKET} is not set: there is no launcher to ask"
            )
        info = self.rank_info or RankInfo.get_for_current_rank()
        self.launcher_connector.send((info.global_rank, req))

    @property
    def timeouts_calc(self) -> TimeoutsCalc | None:
        """The times measured until now; None before the first session."""
        if self._calc is not None:
            self._flush(self._calc)
        return self._calc

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
        self._send_limits()
        return True

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Set section timeouts from the longest durations of all ranks; collective.

        Args:
            selected_sections: Sections to set; all if None. Names not configured are ignored.
            calc_out_of_section: Whether to set also the timeout of the time outside sections.
            skip_if_not_ready: Return False when a time was not measured, instead of raising.

        Returns:
            Whether the timeouts were set, here and in the monitor.

        Raises:
            RankMonitorClientError: Not initialised, or a time was not measured.
            TimeoutsCalcError: There is no process group.
        """
        calc = self._synchronized_calc(counts_outside=calc_out_of_section)
        if selected_sections is not None:
            configured = self.section_timeouts.section if self.section_timeouts else {}
            for name in selected_sections:
                if name not in configured:
                    self._record_unwatched(name)
            selected_sections = [name for name in selected_sections if name in configured]
        if not calc.can_get_section_timeouts(selected_sections, calc_out_of_section):
            return self._not_ready("sections", skip_if_not_ready=skip_if_not_ready)
        self.section_timeouts = calc.get_section_timeouts(
            selected_sections, calc_out_of_section, self.section_timeouts
        )
        self._send_limits()
        return True

    def state_dict(self) -> Mapping[str, Any]:
        """Return the calculated timeouts for a checkpoint; JSON-clean and equal on all ranks."""
        self._check_process()
        state = _write_state(
            self.hb_timeouts if self.is_initialized else self.loaded_hb_timeouts,
            self.section_timeouts if self.is_initialized else self.loaded_section_timeouts,
        )
        return {self.CURRENT_TIMEOUTS_STATE_KEY: state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state` from `state_dict`; in a session its timeouts apply at once."""
        self._check_process()
        current = state.get(self.CURRENT_TIMEOUTS_STATE_KEY) or {}
        self.loaded_hb_timeouts, self.loaded_section_timeouts = _read_state(current)
        if self.is_initialized:
            self._apply_loaded()

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
        heartbeat, loaded = self.loaded_hb_timeouts, self.loaded_section_timeouts
        if heartbeat is not None:
            self.hb_timeouts = heartbeat
        if loaded is not None:
            configured = self.section_timeouts
            assert configured is not None
            section = {
                name: loaded.section.get(name, limit) for name, limit in configured.section.items()
            }
            calculates_outside = loaded.is_out_of_section_calculated
            self.section_timeouts = SectionTimeouts(
                section,
                loaded.out_of_section if calculates_outside else configured.out_of_section,
                loaded.calculated_sections & section.keys(),
                calculates_outside,
            )
        if heartbeat is not None or loaded is not None:
            self._send_limits()

    def _send_limits(self) -> None:
        """Let the timeouts in force count in the monitor; a new monitor gets them again."""
        from ._monitor.messages import SetTimeouts

        link, heartbeat, section = self._link, self.hb_timeouts, self.section_timeouts
        assert link is not None
        assert heartbeat is not None
        assert section is not None
        self._own_limits = {
            "initial_rank_heartbeat_timeout": heartbeat.initial,
            "rank_heartbeat_timeout": heartbeat.subsequent,
            "rank_section_timeouts": dict(section.section),
            "rank_out_of_section_timeout": section.out_of_section,
        }
        limits = self._own_limits
        answer = link.request(lambda number: SetTimeouts(number, limits), ANSWER_LIMIT_S)
        if answer is None:
            self.logger.warning("the rank monitor did not take the new timeouts yet")
        elif answer.problem is not None:
            raise RankMonitorClientError(f"the rank monitor refused timeouts: {answer.problem}")

    def _serves(self, monitor_path: str) -> bool:
        """Return whether this client has the session with the monitor at this path."""
        return self.is_initialized and not self._is_foreign and self._monitor_path == monitor_path

    def _check_process(self) -> None:
        if self._is_foreign:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise RankMonitorClientError(
            self._refusal
            or "the rank monitor client is not initialised: call init_workload_monitoring first"
        )

    def _ask(self) -> None:
        from ._monitor.messages import Ask

        link = self._link
        if link is not None and link.request(Ask, ANSWER_LIMIT_S) is None and self._words is None:
            self._refuse()

    def _should_save(self, calls: int) -> bool:
        """Return whether this is the agreed call or a later one; waits until that is agreed."""
        words = self._words
        if words is not None and words[slot.W_SAVE] == slot.SAVE_ASKED:
            words = self._wait_for_agreement()
        return words is not None and 0 < words[slot.W_SAVE] <= calls

    def _wait_for_agreement(self) -> memoryview | None:
        from nvidia_resiliency_ext.shared_utils.clock import Deadline

        from ._monitor.messages import HeldForSave

        assert self.cfg is not None
        # Once the node's time is over the launcher ends the workers anyway.
        deadline = Deadline.after(self.cfg.preempt_grace)
        while not deadline.expired():
            link, words = self._link, self._words
            if link is None or words is None:
                self._refuse()
            if words[slot.W_SAVE] != slot.SAVE_ASKED:
                return words
            answer = link.request(HeldForSave, deadline.remaining())
            if answer is None:
                link.wait_connected(deadline.remaining())
        self.logger.error("no agreement at which step to save; going on without")
        return None

    def _post(self, message: object) -> None:
        if self._link is not None:
            self._link.post(message)

    def _make_hello(self) -> tuple[Hello, list[int]]:
        from ._monitor.messages import Hello

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
        from ._monitor.link import LinkError

        slot_fd, dump_fd = fds
        try:
            if self._memory is None:
                self._begin_session(accepted, slot_fd)
            else:
                self._resume_session(accepted, slot_fd)
        except (slot.SlotError, ValueError) as exc:
            os.close(slot_fd)
            os.close(dump_fd)
            raise LinkError(f"the rank monitor's offer is of no use: {exc}") from exc
        if self._may_dump:
            faulthandler.register(DUMP_SIGNAL, file=dump_fd, all_threads=True, chain=False)
        previous, self._dump_fd = self._dump_fd, dump_fd
        if previous >= 0:
            os.close(previous)

    def _begin_session(self, accepted: Accepted, slot_fd: int) -> None:
        from .config import FaultToleranceConfig
        from .timeouts_calc import TimeoutsCalc

        cfg = FaultToleranceConfig.from_dict(accepted.config)
        layout = slot.SlotLayout(tuple(accepted.sections))
        memory = slot.SlotMemory.adopt(slot_fd, layout, must_be_sealed=False)
        self.cfg = cfg
        self.hb_timeouts = HeartbeatTimeouts(
            cfg.initial_rank_heartbeat_timeout, cfg.rank_heartbeat_timeout, were_calculated=False
        )
        self.section_timeouts = SectionTimeouts(
            dict(cfg.rank_section_timeouts), cfg.rank_out_of_section_timeout
        )
        self._own_limits = {}
        self._memory = memory
        began = self._begin(memory.words, layout, is_answered=not cfg.skip_section_response)
        self._calc = TimeoutsCalc(
            sections=layout.sections, start_time=began * 1e-9, safety_factor=cfg.safety_factor
        )
        iteration = training_iteration()
        first = slot.NO_ITERATION if iteration is None else iteration
        slot.begin_slot(memory.words, accepted.session_id, began, first)

    def _resume_session(self, accepted: Accepted, slot_fd: int) -> None:
        """Go on with a new monitor: in the same slot, or in the one that it insists on."""
        memory = self._memory
        assert memory is not None
        if os.path.sameopenfile(slot_fd, memory.fd):
            os.close(slot_fd)
        else:
            fresh = slot.SlotMemory.adopt(slot_fd, memory.layout, must_be_sealed=False)
            self._memory = fresh
            self._move(fresh.words)
            memory.close()
            memory = fresh
        memory.words[slot.W_SESSION_ID] = accepted.session_id

    def _on_lost(self) -> bool:
        """Act, in the link's thread, that the monitor is gone; return whether to go on."""
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
        """Send a new monitor this rank's own limits, in the link's thread."""
        from ._monitor.messages import SetTimeouts

        if self._own_limits:
            self._post(SetTimeouts(0, self._own_limits))

    def _release(self) -> None:
        self._stop()
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._unregister_dump()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _unregister_dump(self) -> None:
        if self._dump_fd >= 0:
            faulthandler.unregister(DUMP_SIGNAL)
            os.close(self._dump_fd)
            self._dump_fd = -1

    def _disown(self) -> None:
        """Refuse every further call in a forked child, and release the parent's connection."""
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
        self._unregister_dump()


def _write_state(
    heartbeat: HeartbeatTimeouts | None, section: SectionTimeouts | None
) -> dict[str, Any]:
    """Return the calculated timeouts as JSON-clean values; a part is left out if not calculated."""
    state: dict[str, Any] = {}
    if heartbeat is not None and heartbeat.were_calculated:
        state["heartbeat"] = dataclasses.asdict(heartbeat)
    if section is not None and (
        section.calculated_sections or section.is_out_of_section_calculated
    ):
        state["section"] = dataclasses.asdict(section) | {
            "section": dict(sorted(section.section.items())),
            "calculated_sections": sorted(section.calculated_sections),
        }
    return state


def _read_state(
    state: Mapping[str, Any],
) -> tuple[HeartbeatTimeouts | None, SectionTimeouts | None]:
    """Restore the timeouts from the state of `_write_state`; TypeError: unknown fields."""
    heartbeat, section = state.get("heartbeat"), state.get("section")
    return (
        None if heartbeat is None else HeartbeatTimeouts(**heartbeat),
        None if section is None else SectionTimeouts(**section),
    )


_CLIENTS: weakref.WeakSet[RankMonitorClient] = weakref.WeakSet()


def _disown_all() -> None:
    for client in list(_CLIENTS):
        client._disown()  # noqa: SLF001 - the module's own class


os.register_at_fork(after_in_child=_disown_all)
