# SPDX-License-Identifier: Apache-2.0
"""Looks at one mount and prints what it found as JSON: the program of a probe's child process.

It may hang for ever, which is why it is a process of its own. It is run by its path, without
site-packages, so it imports nothing of ours.
"""

import json
import os
import sys


def main() -> int:
    """Print the first entry's name and the space left at the path behind ``--``."""
    path = sys.argv[2]
    try:
        with os.scandir(path) as entries:
            next(entries, None)
        status = os.statvfs(path)
    except OSError as error:
        print(json.dumps({"error": error.strerror or str(error)}))  # noqa: T201 - its interface
        return 1
    found = {
        "blocks": status.f_blocks,
        "blocks_free": status.f_bavail,
        "block_bytes": status.f_frsize,
        "files": status.f_files,
        "files_free": status.f_favail,
    }
    print(json.dumps(found))  # noqa: T201 - its interface
    return 0


if __name__ == "__main__":
    sys.exit(main())
