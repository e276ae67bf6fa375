# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of one log record: the nvrx logger in each mode against the standard library.

Each figure is a JSON line: the median over repetitions, each in an interpreter of its own. The
standard handlers use the same line format; ``ratio`` is against the one of the same kind.

usage: bench_logger.py [--python PY] [--against PY] [--records 5000] [--repeats 5]
"""

from __future__ import annotations

import _measure

_PROGRAM = r"""
import json, logging, os, sys, tempfile, time
mode, count = sys.argv[1], int(sys.argv[2])
os.environ.update(RANK="3", LOCAL_RANK="3", SLURM_PROCID="0", SLURM_LOCALID="0", WORLD_SIZE="8")
FORMAT = ("%(asctime)s [%(levelname)s] [node] [workload:3(3) infra:0(0)]"
          " %(filename)s:%(lineno)d %(message)s")
with tempfile.TemporaryDirectory() as directory:
    if mode.startswith("std"):
        logger = logging.getLogger("plain")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        if mode == "std_file":
            handler = logging.FileHandler(directory + "/plain.log")
        else:
            handler = logging.StreamHandler(open(os.devnull, "w"))
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    else:
        from nvidia_resiliency_ext.shared_utils.log_manager import setup_logger
        if mode == "nvrx_console":
            sys.stderr = open(os.devnull, "w")
            logger = setup_logger(force_reset=True)
        elif mode == "nvrx_file":
            logger = setup_logger(force_reset=True, log_file=directory + "/a.log")
        else:
            logger = setup_logger(force_reset=True, node_local_tmp_dir=directory + "/logs",
                                  node_local_tmp_prefix="p")
    log = logger.debug if mode.endswith("_off") else logger.info
    message = "x" * 100
    for _ in range(200):
        log(message)
    start = time.perf_counter()
    for _ in range(count):
        log(message)
    print(json.dumps({"us": (time.perf_counter() - start) / count * 1e6}))
"""
_BASELINES = {
    "nvrx_console": "std_console",
    "nvrx_file": "std_file",
    "nvrx_node_local": "std_file",
}
_MODES = ("std_console", "std_file", *_BASELINES, "nvrx_off")


def main() -> None:
    """Print one line per mode and interpreter."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--records", type=int, default=5000)
    options = parser.parse_args()
    calls = {mode: [mode, str(options.records)] for mode in _MODES}
    for name, python in _measure.interpreters(options):
        found = _measure.medians(python, _PROGRAM, calls, options.repeats)
        for mode in _MODES:
            base = found.get(_BASELINES.get(mode, ""), {}).get("us")
            _measure.show("log_record", name, mode, found[mode], key="us", base=base)


if __name__ == "__main__":
    main()
