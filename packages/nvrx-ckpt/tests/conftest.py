# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of nvrx-ckpt: none leaves anything behind."""

import shutil
import subprocess

import leftovers
import pytest
from fork_server import ForkServer

leftovers.open_pipe_of_libuv()

_leaves_nothing_behind = leftovers.guard(
    leftovers.children,
    leftovers.marked_processes,
    leftovers.threads,
    leftovers.descriptors,
    leftovers.shared_memory,
)


@pytest.fixture(scope="session")
def fork_server():
    """Run programs in processes that need not import torch."""
    server = ForkServer(["torch.distributed.checkpoint"])
    yield server
    server.close()


@pytest.fixture
def mounted(tmp_path):
    """Mount file systems below the test's directory; skip where that is not permitted."""
    points = []

    def mount(*options, name):
        folder = tmp_path / name
        folder.mkdir()
        command = ["mount", *options, str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting is not permitted here")
        points.append(folder)
        return folder

    yield mount
    for folder in reversed(points):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def failing_disk(mounted):
    """Mount an ext4 of 96 MiB that has 16 MiB behind it: then its device fails, at fsync."""
    small = mounted("-t", "tmpfs", "-o", "size=16m", "tmpfs", name="small")
    image = small / "image"
    with image.open("wb") as file:
        file.truncate(96 << 20)
    command = ["mkfs.ext4", "-q", "-E", "nodiscard", "-O", "^has_journal", str(image)]
    if shutil.which("mkfs.ext4") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("there is no mkfs.ext4")
    return mounted("-o", "loop", str(image), name="disk")
