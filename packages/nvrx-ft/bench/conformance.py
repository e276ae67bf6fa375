# SPDX-License-Identifier: Apache-2.0
"""Compares workers from standby with fresh ones in everything the probe knows: the full matrix.

    python packages/nvrx-ft/bench/conformance.py [--light] [--times 3]

Every combination of script and `-m`, of light and full import list, and of one and two OpenMP
threads; then every case of ending, starting children and using torch. One JSON line per
combination; the exit status is 1 when anything differs. It takes some twenty minutes on two cores.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

import ft_conformance as conformance

# Native threads that OpenBLAS starts at import when it may use several; see docs/design/nvrx-ft.md.
NATIVE_THREADS = ("before.process.comms", "before.process.policy")


def compare(setting: conformance.Setting, modules: str, times: int) -> dict[str, object]:
    """Return what differs for one combination."""
    different = conformance.state_differences(setting, modules, times)
    if setting.base_env["OMP_NUM_THREADS"] != "1":
        different = {k: v for k, v in different.items() if k not in NATIVE_THREADS}
    cases = conformance.EXIT_CASES + conformance.CHILD_CASES + conformance.NUMPY_CASES
    if "torch" in setting.imports:
        cases += conformance.TORCH_CASES
    if setting.base_env["OMP_NUM_THREADS"] != "1":
        cases = ()
    for case in cases:
        pair = conformance.case_difference(setting, case)
        if pair is not None:
            different[case] = [str(result) for result in pair]
    return different


def main() -> int:
    """Run the matrix; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--light", action="store_true", help="without torch")
    parser.add_argument("--times", type=int, default=3, help="runs of the probe each way")
    options = parser.parse_args()
    if options.times < 2:
        parser.error(
            f"--times {options.times}: at least 2 runs each way show what varies by itself"
        )
    os.umask(0o022)
    lists = [(("numpy", "tempfile"), "numpy")]
    if not options.light:
        lists.append((conformance.standbys.DEFAULT_IMPORTS, "numpy,torch,torch.distributed"))
    failed = False
    for imports, modules in lists:
        for as_module in (False, True):
            for threads in ("1", "2"):
                base = {"OMP_NUM_THREADS": threads}
                if as_module:
                    base["PYTHONPATH"] = str(conformance.PROGRAMS)
                started = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    setting = conformance.Setting(
                        Path(folder), imports=imports, as_module=as_module, base_env=base
                    )
                    different = compare(setting, modules, options.times)
                failed = failed or bool(different)
                line = {
                    "imports": modules,
                    "form": "-m" if as_module else "script",
                    "omp_num_threads": threads,
                    "seconds": round(time.monotonic() - started, 1),
                    "different": different,
                }
                print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
