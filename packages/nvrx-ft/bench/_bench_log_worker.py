# SPDX-License-Identifier: Apache-2.0
"""A rank of bench_cycle_logs.py: writes lines to stdout when told, and says when it is done.

_bench_log_worker.py OUT MODE MEGABYTES: the mode is `flood`, `die`, `fill` or `talk`
"""

import os
import signal
import sys
import time
from pathlib import Path

LINE = b"%-99s\n" % b"iteration 12345/100000 | loss 2.345678 | lr 0.00123 | grad norm 1.234"
BLOCK = LINE * 640


def wait_for(path: Path) -> None:
    """Wait for a file."""
    while not path.exists():
        time.sleep(0.002)


def write(data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def main() -> None:
    """Do what the mode says."""
    out, mode, megabytes = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    rank = os.environ["RANK"]
    others = set(range(os.cpu_count() or 1)) - {0}
    os.sched_setaffinity(0, others or {0})
    (out / f"ready_{rank}").touch()
    wait_for(out / "go")
    if mode == "flood":
        for _ in range(round(megabytes * 1e6 / len(BLOCK))):
            write(BLOCK)
    elif mode == "die":
        write(LINE * ((1 << 20) // len(LINE)))
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "fill":
        os.set_blocking(1, False)
        taken = 0
        try:
            while True:
                taken += os.write(1, LINE)
        except BlockingIOError:
            (out / "taken.new").write_text(str(taken))
            (out / "taken.new").rename(out / "taken")
        os.set_blocking(1, True)
        wait_for(out / "leave")
    else:
        for number in range(round(megabytes)):
            write(b"%d %.9f\n" % (number, time.time()))
            time.sleep(0.001)
    (out / f"done_{rank}").touch()


if __name__ == "__main__":
    main()
