# SPDX-License-Identifier: Apache-2.0
"""Programs named like Slurm's that print what a test says, in the form in which Slurm prints it."""

import json
import os
import sys
from pathlib import Path

PROGRAM = f"""#!{sys.executable} -I
import json, sys, time
from pathlib import Path
here, name = Path(__file__).parent.parent, Path(__file__).name
with open(here / "calls", "a") as calls:
    calls.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
say = json.loads((here / name).read_text())
time.sleep(say.get("takes_s", 0))
jobs = say["jobs"]
if say.get("error"):
    sys.exit(say["error"])
if name == "squeue":
    jobs = [j for j in jobs if j["state"] in ("RUNNING", "COMPLETING")]
    for j in jobs:
        print("|".join([j["id"], j["state"], j["user"], j["partition"], j["nodes"],
                        j.get("array", j["id"]), j.get("index", "N/A"), j["start"],
                        j["name"]]))
elif name == "scontrol":
    for j in jobs:
        print(f"JobId={{j['id']}} JobName={{j['name']}}\\n"
              f"   UserId={{j['user']}}(1000) GroupId=users(100) MCS_label=N/A\\n"
              f"   JobState={{j['state']}} Reason=None Dependency=(null)\\n"
              f"   Requeue=1 Restarts={{j['restarts']}} BatchFlag=1 Reboot=0"
              f" ExitCode={{j.get('exit', '0:0')}}\\n"
              f"   ReqNodeList=(null) ExcNodeList=(null)\\n"
              f"   NodeList={{j['nodes']}}\\n"
              f"   StdErr={{j['out']}}\\n   StdIn=/dev/null\\n   StdOut={{j['out']}}\\n\\n")
    if not jobs:
        print("No jobs in the system")
else:
    wanted = next(a for a in sys.argv if a.startswith("--jobs="))[7:].split(",")
    fields = next(a for a in sys.argv if a.startswith("--format="))[9:].split(",")
    if "StdOut" in fields and say.get("is_old"):
        sys.exit('sacct: fatal: Invalid field requested: "StdOut"')
    if "--duplicates" not in sys.argv:
        jobs = {{j["id"]: j for j in jobs}}.values()
    for j in jobs:
        if j["id"] in wanted:
            values = {{"JobIDRaw": j["id"], "State": j["state"], "ExitCode": j.get("exit", "0:0"),
                      "NodeList": j["nodes"], "FailedNode": j.get("failed", ""),
                      "StdOut": j["out"], "Start": j["start"]}}
            print("|".join(values[field] for field in fields))
"""


class FakeSlurm:
    """A folder with `squeue`, `scontrol` and `sacct`, each with its own view of the jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("squeue", "scontrol", "sacct"):
            (self.bin / name).write_text(PROGRAM)
            (self.bin / name).chmod(0o755)
            self.says(name)

    @property
    def path(self) -> str:
        """The PATH with these programs first."""
        return f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def says(self, name: str, *jobs: dict, **more: object) -> None:
        """Let a program know these jobs from now on; `error`, `takes_s` and `is_old` as named."""
        (self.folder / f"{name}.new").write_text(json.dumps({"jobs": jobs, **more}))
        (self.folder / f"{name}.new").rename(self.folder / name)

    def all_say(self, *jobs: dict) -> None:
        """Let all programs know these jobs."""
        for name in ("squeue", "scontrol", "sacct"):
            self.says(name, *jobs)

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of each call of a program."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call[1:] for call in map(json.loads, lines) if call[0] == name]


def slurm_job(job_id: str, out: object, state: str = "RUNNING", **more: object) -> dict:
    """Return a job as the programs know it."""
    job = {"id": job_id, "state": state, "user": "ada", "partition": "batch", "nodes": "n[1-2]"}
    job |= {"start": "2026-11-20T10:00:00", "restarts": 0}
    return {**job, "name": "train", "out": str(out), **more}
