# SPDX-License-Identifier: Apache-2.0
"""First file of the store server, run by its path; imports as little of torch as it can."""

from __future__ import annotations

import os
import runpy
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_BOOT = os.path.join(os.path.dirname(_HERE), "_monitor", "boot.py")


def run() -> int:
    """Run the store server below an empty shell of the package, which itself would import torch."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    runpy.run_path(_BOOT)["make_shell"]()
    from nvidia_resiliency_ext.inprocess._store_server import server

    return server.main()


if __name__ == "__main__":
    sys.exit(run())
