# SPDX-License-Identifier: Apache-2.0
"""First file of the keeper's program, run by its path: leaves all of torch out that it can."""

from __future__ import annotations

import os
import runpy
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_BOOT = os.path.join(os.path.dirname(_HERE), "_monitor", "boot.py")


def run() -> int:
    """Import the keeper below an empty shell of the package, which itself imports torch; run it."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    runpy.run_path(_BOOT)["make_shell"]()
    from nvidia_resiliency_ext.inprocess._store_server import server

    return server.main()


if __name__ == "__main__":
    sys.exit(run())
