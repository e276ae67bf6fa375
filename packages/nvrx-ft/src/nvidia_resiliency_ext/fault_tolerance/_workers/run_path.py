# SPDX-License-Identifier: Apache-2.0
"""What a worker of `--run-path` runs: the script, by its path, inside this interpreter."""

from __future__ import annotations

import runpy
import sys


def run_script_path(script: str, *args: str) -> None:
    """Run the file `script` with `args` as `__main__`, as if it had been started by itself."""
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_script_path(*sys.argv[1:])
