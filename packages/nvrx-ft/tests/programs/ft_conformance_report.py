# SPDX-License-Identifier: Apache-2.0
"""Prints, as JSON, where the probe's facts differ between a cold worker and one from standby.

`ft_conformance_report.py HELPERS FOLDER`: the folder of the test helpers, a folder to work in.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])

import ft_conformance


def main():
    """Compare once and print."""
    os.umask(0o022)
    setting = ft_conformance.Setting(Path(sys.argv[2]), imports=("numpy",))
    standby_policy = []
    found = ft_conformance.state_differences(
        setting,
        "numpy",
        times=1,
        before_go=lambda standby: standby_policy.append(os.sched_getscheduler(standby.child.pid)),
    )
    # One run each way cannot tell what varies.
    reported = {key: value for key, value in found.items() if key.startswith("before.process")}
    print(json.dumps({"user": os.getuid(), "held": standby_policy, "different": reported}))


if __name__ == "__main__":
    main()
