# SPDX-License-Identifier: Apache-2.0
"""Measures a restart: SIGKILL of one of four ranks until the restarted group trains again.

Three cases: in steady state (12 s after the first step, when standbys are ready), right
after the start (0.3 s, when they are not), and, without standbys, up to the first line of the new
ranks. Gloo on CPU, at default settings otherwise.

    python bench_restart.py [--python PY] [--against PY2] [--launcher torchrun] [--case steady]
"""

from __future__ import annotations

import _bench

RANKS = 4
STEP_S = 0.1
CASES = {
    "steady": (12.0, "first_step", ()),
    "early": (0.3, "first_step", ()),
    "cold": (0.3, "first_line", ("--ft-prewarm", "off")),
}


def main() -> None:
    """Measure."""
    parser = _bench.parser(__doc__, repeats=3)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    options = parser.parse_args()
    for case in options.case or CASES:
        kill_after_s, until, flags = CASES[case]

        def once(
            candidate: _bench.Candidate,
            kill_after_s: float = kill_after_s,
            until: str = until,
            flags: tuple[str, ...] = flags,
        ) -> dict[str, float]:
            ours = flags if candidate.name == "ours" else ()
            with _bench.folder() as out:
                mode = "bare" if until == "first_line" else "ddp"
                command = candidate.command(RANKS, 2, [*options.flags.split(), *ours])
                # Long enough for the rank that dies; the new ranks do the same steps again.
                steps = str(int(kill_after_s / STEP_S) + 5) if mode == "ddp" else "1"
                command += [*_bench.rank(mode, out), "--steps", steps]
                command += ["--step-s", str(STEP_S), "--kill-rank", str(RANKS - 1)]
                events = _bench.run([*command, "--kill-after-s", str(kill_after_s)], out)
                killed = events[0, RANKS - 1]["killed"]
                return {f"kill to {until}": _bench.last(events, 1, until) - killed}

        _bench.measure(options, once, prefix=f"restart {case}: ")


if __name__ == "__main__":
    main()
