# SPDX-License-Identifier: Apache-2.0
"""Measures how soon ranks that wait in a gloo collective are out of it after an abort.

Four ranks; the last one never comes to the collective, and each keeps the group alive with a local
variable, as a model does. All abort at the same moment. One JSON line: the slowest rank of each
round, median and worst over the rounds, in ms, and the abort itself.

With `--against`, an install whose `AbortTorchDistributed` has the same name is measured, too; what
it does not unblock is given up after `--limit` seconds (gloo's own timeout).

    python bench_gloo_abort.py [--python PY] [--against PY2] [--rounds 10] [--groups 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

PROGRAM = r"""
import datetime, json, multiprocessing, os, socket, sys, threading, time
import torch, torch.distributed as dist
from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.state import State

rounds, count, limit = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
world_size = 4
kept = []

def once(rank, number, store, pipe, barrier):
    dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank,
                            world_size=world_size, timeout=datetime.timedelta(seconds=limit))
    groups = [dist.new_group(list(range(world_size))) for _ in range(count)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    group = groups[-1]
    begun = threading.Event()
    times = {}
    def abort():
        begun.wait()
        barrier.wait()
        time.sleep(0.1)
        barrier.wait()
        times["start"] = time.monotonic()
        try:
            AbortTorchDistributed()(State(rank, world_size).freeze())
        except Exception as error:
            print(error, file=sys.stderr)
        times["aborted"] = time.monotonic()
    thread = threading.Thread(target=abort)
    thread.start()
    begun.set()
    try:
        if rank == world_size - 1:
            thread.join()
            raise RuntimeError("the fault")
        dist.all_reduce(torch.ones(1000), group=group)
    except RuntimeError as error:
        times["out"] = time.monotonic()
        kept.append(error)
        thread.join()
        barrier.wait()
        kept.clear()
    pipe.send((times["out"] - times["start"], times["aborted"] - times["start"]))

def run(rank, port, pipe, barrier):
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    for number in range(rounds):
        once(rank, number, store, pipe, barrier)
    barrier.wait()
    os._exit(0)

context = multiprocessing.get_context("fork")
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
barrier = context.Barrier(world_size)
pipes = [context.Pipe() for _ in range(world_size)]
ranks = [context.Process(target=run, args=(rank, port, pipes[rank][1], barrier))
         for rank in range(world_size)]
for each in ranks:
    each.start()
for _ in range(rounds):
    found = [pipes[rank][0].recv() for rank in range(world_size)]
    # The last rank is not in the collective.
    print(json.dumps([max(out for out, _ in found[:-1]), max(aborted for _, aborted in found)]))
for each in ranks:
    each.join()
"""


def main() -> None:
    """Print one line per interpreter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter under test")
    parser.add_argument("--against", help="interpreter to compare with, in the same run")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--groups", type=int, default=1, help="groups beside the default one")
    parser.add_argument("--limit", type=float, default=10.0, help="gloo's timeout in seconds")
    options = parser.parse_args()
    for name in ("python", "against"):
        python = getattr(options, name)
        if python is not None:
            given = [str(options.rounds), str(options.groups), str(options.limit)]
            print(json.dumps({"bench": "gloo abort", "python": name, **_figures(python, given)}))


def _figures(python: str, arguments: list[str]) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", PROGRAM, *arguments],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=directory,
            check=False,
        )
    if done.returncode or not done.stdout:
        return {"error": done.stderr[-300:]}
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    out, aborted = ([each[index] * 1e3 for each in rounds] for index in (0, 1))
    return {
        "out_ms": round(statistics.median(out), 2),
        "worst_out_ms": round(max(out), 2),
        "abort_ms": round(statistics.median(aborted), 2),
        "worst_abort_ms": round(max(aborted), 2),
    }


if __name__ == "__main__":
    main()
