# SPDX-License-Identifier: Apache-2.0
"""`python -m nvidia_resiliency_ext.checkpointing verify|list|diff`: inspect checkpoints on disk.

Nothing is unpickled, so it is safe for checkpoints of unknown origin.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out

from ._errors import DamagedCheckpointError
from ._progress import ProgressBar, size_text
from ._verify import CheckpointItem, checkpoint_items, verify_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

WHOLE, NOT_WHOLE, USAGE, CANNOT_TELL = range(4)
_MAX_LINES = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    Args:
        argv: Arguments; default those of the process.
    """
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except (DamagedCheckpointError, NotADirectoryError) as error:
        write_err(f"{plain(str(error))}\n")
        return USAGE if isinstance(error, NotADirectoryError) else NOT_WHOLE
    except OSError as error:
        write_err(f"{plain(str(error))}\n")
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nvidia_resiliency_ext.checkpointing",
        description="Look at checkpoints on disk. Exit code: 0 whole (or equal), 1 not, 2 wrong "
        "usage, 3 cannot tell (no manifest).",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("verify", _verify, "compare every byte with its checksum"),
        ("list", _list, "show files, tensors and checksums"),
        ("diff", _diff, "show which tensors differ between two checkpoints"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("dir", metavar="DIR", help="directory of a checkpoint")
        if name == "diff":
            command.add_argument("other", metavar="OTHER", help="directory of the other one")
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _verify(options: argparse.Namespace) -> int:
    with ProgressBar(shown=sys.stderr.isatty() and not options.json) as bar:
        report = verify_checkpoint(options.dir, on_progress=bar.show)
    if options.json:
        write_out(json.dumps({**asdict(report), "whole": report.whole}) + "\n")
    elif not report.has_manifest:
        write_out(f"{plain(report.path)}: cannot tell, there is no manifest\n")
    elif report.problems:
        lines = [plain(problem) for problem in report.problems[:_MAX_LINES]]
        more = len(report.problems) - len(lines)
        lines += [f"and {more} more"] if more else []
        write_out(f"{plain(report.path)}: NOT whole\n" + "".join(f"  {line}\n" for line in lines))
    else:
        what = f"{report.files} files, {report.items} items, {size_text(report.nbytes)}"
        write_out(f"{plain(report.path)}: whole ({what})\n")
    if not report.has_manifest:
        return CANNOT_TELL
    return WHOLE if report.whole else NOT_WHOLE


def _list(options: argparse.Namespace) -> int:
    items = checkpoint_items(options.dir)
    if items is None:
        write_err(f"{plain(options.dir)}: there is no manifest\n")
        return CANNOT_TELL
    if options.json:
        write_out(json.dumps([asdict(item) for item in items]) + "\n")
        return WHOLE
    for item in items:
        line = f"{item.file}  {item.start:>12}  {size_text(item.length):>10}  {item.crc32:08x}"
        if not write_out(f"{plain(line)}  {plain(item.name)}\n"):
            break
    return WHOLE


def _diff(options: argparse.Namespace) -> int:
    left, right = checkpoint_items(options.dir), checkpoint_items(options.other)
    if left is None or right is None:
        missing = options.dir if left is None else options.other
        write_err(f"{plain(missing)}: there is no manifest\n")
        return CANNOT_TELL
    ours, theirs = _by_name(left), _by_name(right)
    found = {
        "only in the first": sorted(ours.keys() - theirs.keys()),
        "only in the second": sorted(theirs.keys() - ours.keys()),
        "different": sorted(n for n in ours.keys() & theirs.keys() if ours[n] != theirs[n]),
    }
    if options.json:
        write_out(json.dumps(found) + "\n")
    else:
        lines = [f"{kind}: {plain(name)}\n" for kind, names in found.items() for name in names]
        write_out("".join(lines) or f"equal ({len(ours)} items)\n")
    return NOT_WHOLE if any(found.values()) else WHOLE


def _by_name(items: Sequence[CheckpointItem]) -> dict[str, tuple[int, int]]:
    return {item.name: (item.length, item.crc32) for item in items}


if __name__ == "__main__":
    sys.exit(main())
