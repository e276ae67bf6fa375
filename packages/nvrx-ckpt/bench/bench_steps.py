# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of the steps of a save: checksums, writing, and sending a copy to a peer.

    python bench_steps.py --mb 256 --root /dev/shm/bench-steps

CPU time hardly depends on what else the machine does, unlike the rates of `bench_save.py` and
`bench_local.py`; steps that run side by side cost no time where a core is free. One JSON line per
step, the least of several rounds; rounds of all steps take turns.
"""

import argparse
import json
import os
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from nvidia_resiliency_ext.checkpointing._checksum import crc32
from nvidia_resiliency_ext.checkpointing._durable import FileSaver
from nvidia_resiliency_ext.checkpointing._shard.directory import RankDirectory
from nvidia_resiliency_ext.checkpointing._shard.job import SaveJob, run_save_job
from nvidia_resiliency_ext.checkpointing._shard.layout import ShardIdentity
from nvidia_resiliency_ext.checkpointing._shard.peer import Peer
from nvidia_resiliency_ext.checkpointing._shard.peer_server import PeerServer
from nvidia_resiliency_ext.checkpointing._shard.write import ShardContent
from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer
from nvidia_resiliency_ext.checkpointing._write_plan import FilePlan, ItemPlan, WritePlan

MIB = 1 << 20
CHUNK = 8 * MIB
TENSORS = 32
ROWS = 512


def chunks(view: memoryview) -> list[memoryview]:
    """Return pieces of 8 MiB."""
    return [view[start : start + CHUNK] for start in range(0, len(view), CHUNK)]


def sums_by_place(words: Any) -> None:
    """Add up rows and columns of 2 MiB blocks: a checksum that depends on places, in numpy."""
    for start in range(0, len(words), ROWS * ROWS):
        block = words[start : start + ROWS * ROWS].reshape(-1, ROWS)
        zlib.crc32(block.sum(axis=0).tobytes() + block.sum(axis=1).tobytes())


def steps_of(options: argparse.Namespace, view: memoryview) -> dict[str, Callable[[], Any]]:
    """Return what is measured."""
    words = np.frombuffer(view, np.uint64)
    nbytes = len(view)
    each = nbytes // TENSORS
    server = PeerServer(
        RankDirectory(options.root, "", 1), "127.0.0.1", b"t" * 32, lambda *_: "", 60.0
    )
    peer = Peer(1, "127.0.0.1", server.port, b"t" * 32, 60.0)
    listener = socket.create_server(("127.0.0.1", 0))
    out = socket.create_connection(listener.getsockname())
    inward, _ = listener.accept()

    def plain_write() -> None:
        path = os.path.join(options.root, "plain")
        with open(path, "wb", buffering=0) as file:
            file.writelines(chunks(view))
        os.unlink(path)

    def file_saver() -> None:
        path = os.path.join(options.root, "saver")
        items = [ItemPlan(str(i), i * each, each) for i in range(TENSORS)]
        FileSaver(WritePlan([FilePlan(path, 0, nbytes, items)], sync=False), view).run()
        os.unlink(path)

    def transport() -> None:
        def receive() -> None:
            buffer, left = memoryview(bytearray(MIB)), nbytes
            while left:
                left -= inward.recv_into(buffer[: min(left, MIB)])

        thread = threading.Thread(target=receive)
        thread.start()
        for piece in chunks(view):
            out.sendall(piece)
        thread.join()

    def shard(peers: tuple[Peer, ...]) -> None:
        identity = ShardIdentity(1, 0, "", 2)
        content = ShardContent(identity, "x", b"N.", ((each, ""),) * TENSORS)
        storages = [view[i * each : (i + 1) * each] for i in range(TENSORS)]
        problem = run_save_job(SaveJob(options.root, "", 0, content, peers), storages)
        if problem:
            raise SystemExit(problem)

    return {
        "zlib.crc32": lambda: zlib.crc32(view),
        "crc32 of this package": lambda: [crc32(piece) for piece in chunks(view)],
        "sum of words": words.sum,
        "sums by place": lambda: sums_by_place(words),
        "plain write": plain_write,
        "file of a DCP save": file_saver,
        "transport": transport,
        "local shard": lambda: shard(()),
        "local shard and copy": lambda: shard((peer,)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", default="/dev/shm/bench-steps")  # noqa: S108
    options = parser.parse_args()
    os.makedirs(options.root, mode=0o700)
    buffer = StagingBuffer(options.mb * MIB)
    buffer.view[:] = os.urandom(MIB) * options.mb
    steps = steps_of(options, buffer.view)
    best: dict[str, float] = {}
    for _ in range(options.repeats):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            best[name] = min(best.get(name, 1e9), time.process_time() - begin)
    for name, seconds in best.items():
        rate = options.mb / 1024 / seconds
        print(json.dumps({"step": name, "cpu_s": round(seconds, 3), "gib_per_s": round(rate, 2)}))
    shutil.rmtree(options.root)


if __name__ == "__main__":
    main()
