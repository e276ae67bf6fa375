# SPDX-License-Identifier: Apache-2.0
"""A rank without torch: does what lines on its input say, and writes what it hears.

Lines are JSON lists: a name and arguments. The rank stamps from a thread until it is told not to.
"""

import json
import sys
import threading

from monitor_modules import (
    Decided,
    Interrupted,
    Interruption,
    MonitorLink,
    MonitorSettings,
    Phase,
    ProgressPage,
    start,
)

_lock = threading.Lock()


def notify(*what):
    """Write a line."""
    with _lock:
        print(json.dumps(what), flush=True)


class Rank:
    """The rank's link, page and stamping thread."""

    def __init__(self, rank, world_size, settings):
        self.rank, self.world_size = rank, world_size
        self.page = ProgressPage.create()
        self.link = MonitorLink(MonitorSettings(**settings), self.page, self.on_event)
        self.stuck = threading.Event()
        self.stamper = threading.Thread(target=self.stamp, daemon=True)
        self.stamper.start()

    def stamp(self):
        while not self.stuck.wait(0.01):
            self.page.stamp_auto()

    def on_event(self, event):
        name = type(event).__name__
        if isinstance(event, Decided):
            made = event.decision
            records = [[each.rank, each.interruption.name] for each in made.records]
            notify(name, event.iteration, sorted(made.going_on), list(made.terminated), records)
        elif isinstance(event, Interrupted):
            records = [[each.rank, each.interruption.name] for each in event.records]
            notify(name, event.iteration, records)
        else:
            notify(name, getattr(event, "iteration", None), getattr(event, "text", ""))

    def attach(self):
        self.link.attach(self.rank, self.world_size)
        notify("attached", self.link.monitor_pid)

    def begin(self, iteration, rank, world_size, who):
        self.page.rearm()
        self.page.phase = Phase.GUARDED
        self.link.begin(iteration, rank, world_size, who)
        notify("begun", iteration)

    def report(self, kind):
        self.link.report(Interruption[kind])

    def completed(self):
        self.link.completed()

    def arrive(self):
        self.page.phase = Phase.AT_BARRIER
        self.link.arrive()

    def leave(self, is_lost, is_discarded=False):
        self.page.phase = Phase.IDLE
        notify("left", self.link.leave(is_lost, is_discarded=is_discarded))

    def ping(self):
        self.page.stamp_manual()

    def freeze(self):
        self.stuck.set()
        notify("frozen")

    def monitor(self):
        notify("monitor", self.link.monitor_pid)

    def close(self):
        self.link.close()
        notify("closed", [each.name for each in threading.enumerate()])


def main():
    """Obey until the input ends."""
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
    if "prestart" in sys.argv:
        start.ensure_started()
        notify("started")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            getattr(rank, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test evaluates it
            notify("error", type(error).__name__, str(error))


main()
