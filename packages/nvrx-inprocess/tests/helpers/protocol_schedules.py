# SPDX-License-Identifier: Apache-2.0
"""Two ways to run the model of a job: a store in memory with a seeded order, and a real one."""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from protocol_model import Actor, Job, Killed, WrongError

MOST_STEPS = 60_000


class DistStoreError(RuntimeError):
    """As torch's: time is over."""


class Schedule:
    """Runs one actor at a time, up to its next operation, in an order that the seed gives.

    Actors are threads that hand a baton around: nothing ever runs at the same time.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"order {seed}")
        self._back = threading.Lock()
        self._back.acquire()
        self._actors: list[_Running] = []
        self.values: dict[str, bytes] = {}
        self.steps = 0
        self.job = Job(seed, self)

    def run(self) -> Job:
        """Run the job to its end, and check it.

        Raises:
            WrongError: a rule is broken, or it never ends.
        """
        self.job.start()
        try:
            while any(not actor.done for actor in self._actors):
                self._step()
        finally:
            for actor in self._actors:
                actor.abandon()
        self.job.check_end()
        return self.job

    def _step(self) -> None:
        self.steps += 1
        running = [actor for actor in self._actors if not actor.done]
        ready = [actor for actor in running if actor.can_run()]
        waiting = [actor for actor in running if actor.keys and actor not in ready]
        # Time passes for those who wait, at the latest when nothing else can happen.
        if waiting and (not ready or self._rng.random() < 0.02):
            chosen, chosen_expired = self._rng.choice(waiting), True
        elif ready:
            chosen, chosen_expired = self._rng.choice(ready), False
        else:
            raise WrongError(f"nobody can go on: {[actor.actor.name for actor in running]}")
        if self.steps > MOST_STEPS:
            raise WrongError("it never ends")
        chosen.resume(expired=chosen_expired)
        self._back.acquire()
        if chosen.error is not None:
            raise chosen.error

    def start(self, actor: Actor, work: Callable[[Any], None]) -> None:
        self._actors.append(_Running(self, actor, work))

    def park(self, actor: Actor, ready: Callable[[], bool]) -> None:
        running = next(each for each in self._actors if each.actor is actor)
        running.ready = ready
        running.hand_over()
        running.ready = None
        if actor.doomed:
            raise Killed

    def give_back(self) -> None:
        self._back.release()


class _Running:
    """An actor's thread, which runs only while it holds the baton."""

    def __init__(self, schedule: Schedule, actor: Actor, work: Callable[[Any], None]) -> None:
        self.schedule = schedule
        self.actor = actor
        self.done = False
        self.error: BaseException | None = None
        self.keys: list[str] = []
        self.ready: Callable[[], bool] | None = None
        self._expired = False
        self._abandoned = False
        self._baton = threading.Lock()
        self._baton.acquire()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def can_run(self) -> bool:
        if self.actor.doomed:
            return True
        if self.keys:
            return all(key in self.schedule.values for key in self.keys)
        return self.ready is None or self.ready()

    def resume(self, *, expired: bool) -> None:
        self._expired = expired
        self._baton.release()

    def hand_over(self) -> bool:
        """Let others run; return whether the time of a wait is over."""
        self.schedule.give_back()
        self._baton.acquire()
        if self._abandoned:
            raise Killed
        return self._expired

    def abandon(self) -> None:
        if not self.done:
            self._abandoned = True
            self._baton.release()
        self._thread.join()

    def _run(self, work: Callable[[Any], None]) -> None:
        self._baton.acquire()
        if not self._abandoned:
            try:
                work(ModelStore(self))
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - raised by the runner
                self.error = error
        self.done = True
        if not self._abandoned:
            self.schedule.give_back()


class ModelStore:
    """A store in memory with the semantics of torch's TCPStore; each operation is one step."""

    def __init__(self, running: _Running) -> None:
        self._running = running
        self._values = running.schedule.values
        self.timeout = timedelta(seconds=1)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: str) -> None:
        self._step()
        self._values[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        self._step()
        self._values[key] = self._values.get(key, b"") + value.encode()

    def add(self, key: str, step: int) -> int:
        self._step()
        number = int(self._values.get(key, b"0")) + step
        self._values[key] = str(number).encode()
        return number

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self._step()
        if key not in self._values:
            if expected:
                return expected.encode()
            self._values[key] = wanted.encode()
        elif self._values[key] == expected.encode():
            self._values[key] = wanted.encode()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._step()
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        self._step()
        return self._values.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # noqa: ARG002 - torch's
        self._step(keys)

    def get(self, key: str) -> bytes:
        self._step([key])
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._step(keys)
        return [self._values[key] for key in keys]

    def _step(self, keys: list[str] | None = None) -> None:
        running = self._running
        running.keys = keys or []
        expired = running.hand_over()
        running.keys = []
        running.schedule.job.before_operation(running.actor)
        if expired and not all(key in self._values for key in keys or ()):
            raise DistStoreError("wait timeout")


class RealRun:
    """Runs the job in threads over connections to a real store.

    Args:
        seed: Of the job's faults; the order is the machine's.
        connect: Makes a connection below a prefix of this run.
    """

    def __init__(self, seed: int, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self.job = Job(seed, self)

    def run(self, timeout_s: float) -> Job:
        """Run the job to its end, and check it."""
        self.job.start()
        # Successors are started meanwhile.
        for thread in iter(self._next_thread, None):
            thread.join(timeout_s)
            if thread.is_alive():
                for node in self.job.nodes:
                    node.lost = True
                raise WrongError(f"it never ends: {self._errors}, {self._where_all_are()}")
        if self._errors:
            raise self._errors[0]
        self.job.check_end()
        return self.job

    def _where_all_are(self) -> str:
        frames = sys._current_frames()
        alive = [frames[t.ident] for t in self._threads if t.is_alive() and t.ident in frames]
        return "\n".join("".join(traceback.format_stack(frame)) for frame in alive)

    def _next_thread(self) -> threading.Thread | None:
        return next((thread for thread in self._threads if thread.is_alive()), None)

    def start(self, actor: Actor, work: Callable[[Any], None]) -> None:
        def run() -> None:
            try:
                work(FaultyStore(self._connect(), actor, self))
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - raised by the runner
                self._errors.append(error)
                for node in self.job.nodes:
                    node.lost = True
            self.changed()

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def park(self, actor: Actor, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: actor.doomed or ready(), 0.05)
        if actor.doomed:
            raise Killed

    def changed(self) -> None:
        with self._changed:
            self._changed.notify_all()


class FaultyStore:
    """A real store whose user may end before each operation."""

    def __init__(self, store: Any, actor: Actor, run: RealRun) -> None:
        self._store = store
        self._actor = actor
        self._run = run

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in ("timeout", "set_timeout", "has_extended_api", "clone"):
            return method

        def call(*args: Any) -> Any:
            self._run.changed()
            self._run.job.before_operation(self._actor)
            return method(*args)

        return call
