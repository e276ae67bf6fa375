# SPDX-License-Identifier: Apache-2.0
"""Starts a child that reads its input to the end, prints its number, and waits to be killed."""

import signal
import subprocess

from nvidia_resiliency_ext.shared_utils.children import start_child

child = start_child(["cat"], stdin=subprocess.PIPE, wake_when_orphaned=True)
print(child.pid, flush=True)
signal.pause()
