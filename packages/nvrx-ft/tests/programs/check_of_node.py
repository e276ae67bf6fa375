# SPDX-License-Identifier: Apache-2.0
"""The launcher's check on one of two nodes.

The argument of its number is a list of the launcher's words. After the line REPORT follows what it
writes on stdout.
"""

import contextlib
import io
import json
import os
import sys

from nvidia_resiliency_ext.fault_tolerance.launcher import main

written = io.StringIO()
try:
    with contextlib.redirect_stdout(written):
        main(
            ["--check", "--json", "--nnodes=2", *json.loads(sys.argv[1 + int(os.environ["RANK"])])]
        )
finally:
    sys.stderr.flush()
    print("REPORT", written.getvalue(), sep="\n")
