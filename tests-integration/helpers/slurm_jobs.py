# SPDX-License-Identifier: Apache-2.0
"""Jobs of launchers under a real Slurm, started by the commands of the guide.

The guide's commands name `train.py` and the example scripts; a folder that all hosts share holds
both, with counting ranks as the training. What a user would not give on a command line for a test,
such as a short lease, comes from a configuration file.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fault_jobs import DEADLINE_S, wait_until
from hosts import CHECKOUT
from many_nodes import COUNTING_RANK
from slurm_cluster import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from many_nodes import Entry, NodesJob
    from slurm_cluster import SlurmCluster

GUIDE = CHECKOUT / "docs/guides/slurm.md"
EXAMPLES = CHECKOUT / "packages/nvrx-ft/examples/slurm"
SETTINGS = "fault_tolerance:\n  lease: 1\n  prewarm: 'off'\n"
TRAIN = """\
import runpy
import sys

sys.argv[1:] = [{shared!r}, *{arguments!r}]
runpy.run_path({program!r}, run_name="__main__")
"""


def guide_command(heading: str) -> str:
    """Return the first shell block of the guide below a heading."""
    below = rf"^#+ {re.escape(heading)}$.*?^```sh\n(.*?)^```$"
    found = re.search(below, GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{GUIDE} has no command below {heading!r}"
    return found[1]


class SlurmJobs:
    """What a user does with a cluster, in a shared folder with a `train.py`."""

    def __init__(self, job: NodesJob, slurm: SlurmCluster) -> None:
        """Prepare the folder; the job says what its ranks record."""
        self.job = job
        self.slurm = slurm
        self.folder = job.folder / "home"
        self.folder.mkdir()
        for script in EXAMPLES.glob("*.sh"):
            shutil.copy(script, self.folder)
        (self.folder / "ft.yaml").write_text(SETTINGS)

    def write_training(self, *arguments: str) -> None:
        """Write `train.py`, which counts with these arguments."""
        (self.folder / "train.py").write_text(
            TRAIN.format(
                shared=str(self.job.shared), arguments=arguments, program=str(COUNTING_RANK)
            )
        )

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a user's shell."""
        environment = self.slurm.environment(self.job.environment({"NVRX_EVENT_DIR": None}))
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}:/usr/sbin"
        environment["SLURM_CONF"] = str(self.slurm.folder / "slurm.conf")
        environment["PET_FT_CFG_PATH"] = str(self.folder / "ft.yaml")
        return environment | dict(more or {})

    def shell(self, text: str, **more: Any) -> str:
        """Run a shell's text as the user would, on the controller; return what it printed."""
        shown = self.slurm.controller.run(
            ["sh", "-eu", "-c", text],
            env=self.environment(more.pop("env", None)),
            **{"cwd": self.folder, "timeout": LIMIT_S, **more},
        )
        return shown.stdout + shown.stderr

    def submit(self, text: str, **more: Any) -> str:
        """Run a text that submits a job, and return the job's id."""
        said = self.shell(text, **more)
        found = re.search(r"^(?:Submitted batch job )?(\d+)$", said, re.MULTILINE)
        assert found is not None, said
        return found[1]

    # --- what is seen --------------------------------------------------------------------------

    def logs(self) -> str:
        """Return the ends of all logs, for messages."""
        texts = [f"--- {p.name}\n{p.read_text()[-6000:]}" for p in self.folder.glob("*.out")]
        return "\n".join([*sorted(texts), self.slurm.logs(), self.shell("squeue -r -t all")])

    def log(self, job: str) -> str:
        """Return what a job has printed."""
        return (self.folder / f"slurm-{job}.out").read_text(errors="replace")

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING, with its exit code: `FAILED 93:0`."""
        shown = self.slurm.run("scontrol", "show", "job", job, check=False).stdout
        words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return f"{words.get('JobState', 'gone')} {words.get('ExitCode', '')}"

    def hosts(self, job: str) -> list[str]:
        """Return on which hosts a job, or a task of an array, runs."""
        shown = self.slurm.run("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
        return self.slurm.run("scontrol", "show", "hostnames", shown).stdout.split()

    def wait_for(self, condition: Callable[[], Any], limit_s: float = DEADLINE_S) -> Any:
        """Wait until a condition holds and return its value."""
        return wait_until(condition, self.logs, limit_s)

    def wait_for_state(self, job: str, state: str, limit_s: float = DEADLINE_S) -> None:
        """Wait until a job's state with its exit code begins so."""
        self.wait_for(lambda: self.state(job).startswith(state), limit_s)

    def wait_for_ranks(
        self, cycle: int, ranks: int, *, attempt: int = 0, step: int = 1, limit_s: float = 60.0
    ) -> list[Entry]:
        """Wait until so many ranks of a cycle have done a step; return what they began with."""

        def done() -> bool:
            steps = [e for e in self.job.entries("step", cycle) if e["attempt"] == attempt]
            return len({e["rank"] for e in steps if e["step"] >= step}) >= ranks

        self.wait_for(done, limit_s)
        begun = [e for e in self.job.entries("start", cycle) if e["attempt"] == attempt]
        return sorted(begun, key=lambda entry: int(entry["rank"]))
