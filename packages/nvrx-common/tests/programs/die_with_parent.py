# SPDX-License-Identifier: Apache-2.0
"""Starts a child that must die with it, prints the child's number, and waits to be killed."""

import signal

from nvidia_resiliency_ext.shared_utils.children import start_child

child = start_child(["sleep", "600"], die_with_parent=True)
print(child.pid, flush=True)
signal.pause()
