# SPDX-License-Identifier: Apache-2.0
"""A rank that runs one example after the other; arguments: a folder, and the files."""

import os
import runpy
import sys

_, folder, *examples = sys.argv
first_port = int(os.environ["MASTER_PORT"])
for number, example in enumerate(examples):
    # The store of the example before may still be there.
    os.environ["MASTER_PORT"] = str(first_port + number)
    sys.argv = [example, folder]
    runpy.run_path(example, run_name="__main__")
