# SPDX-License-Identifier: Apache-2.0
"""Run the code blocks of the documentation that are marked ``python test`` or ``sh test``.

Each block is a program of its own: it runs in an empty folder, with the interpreter that runs this
first on PATH, under a deadline, and whatever it started is ended with it. The folder of a block
marked ``test clone`` has links to what a clone of the repository has.

A package's README is shown by package indexes, which have no other file of the repository. So its
links are whole addresses, and those that begin with ``REPOSITORY`` name what is in this checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "packages/*/README.md", "docs/*.md", "docs/guides/*.md")
DEADLINE_S = 120.0
TAIL_LINES = 40
FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<info>[^`]*)$")
LINK = re.compile(r"\]\(([^)\s#]+)")
REPOSITORY = "https://github.com/nvrx/nvrx/blob/main/"
CLONE = ("packages", "tests-integration", "tools")
COMMANDS = {"python": [sys.executable, "-W", "error"], "sh": ["sh", "-eu"]}
SUFFIXES = {"python": ".py", "sh": ".sh"}


@dataclass(frozen=True)
class Block:
    """One marked code block; ``line`` is where its first line of code stands."""

    path: Path
    line: int
    language: str
    code: str
    needs_clone: bool = False


def blocks_of(path: Path) -> list[Block]:
    """Return the marked blocks of a page, in order."""
    found: list[Block] = []
    opened: re.Match[str] | None = None
    start = 0
    lines: list[str] = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        match = FENCE.match(text)
        if opened is None:
            if match is not None:
                opened, start, lines = match, number + 1, []
            continue
        if match is None or match["info"].strip() or not match["fence"].startswith(opened["fence"]):
            lines.append(text.removeprefix(opened["indent"]))
            continue
        words = opened["info"].split()
        if words[1:2] == ["test"]:
            if words[0] not in COMMANDS or words[2:] not in ([], ["clone"]):
                raise SystemExit(f"{path}:{start - 1}: cannot run a block marked {opened['info']}")
            code = "\n".join(lines) + "\n"
            found.append(Block(path, start, words[0], code, needs_clone="clone" in words))
        opened = None
    if opened is not None:
        raise SystemExit(f"{path}:{start - 1}: this code block has no end")
    return found


def bad_links(root: Path) -> list[str]:
    """Return the links of the packages' READMEs that an index could not follow."""
    return [
        f"{path.relative_to(root)}: {target} "
        + ("is not in the repository" if "://" in target else "is no whole address")
        for path in sorted(root.glob("packages/*/README.md"))
        for target in LINK.findall(path.read_text())
        if "://" not in target
        or (target.startswith(REPOSITORY) and not (root / target[len(REPOSITORY) :]).exists())
    ]


def run(block: Block, deadline_s: float) -> str | None:
    """Run one block; return what went wrong with the end of its output, or None."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env.get("PATH", os.defpath)))
    with tempfile.TemporaryDirectory(prefix="nvrx-docs-") as name:
        folder = Path(name)
        program = folder / f"block{SUFFIXES[block.language]}"
        # Blank lines in front keep the page's line numbers in error messages.
        program.write_text("\n" * (block.line - 1) + block.code)
        work = folder / "work"
        work.mkdir()
        if block.needs_clone:
            for each in CLONE:
                (work / each).symlink_to(ROOT / each)
        with (folder / "output").open("w+") as output:
            child = subprocess.Popen(
                [*COMMANDS[block.language], str(program)],
                cwd=work,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = child.wait(deadline_s)
                problem = f"exit code {code}" if code else None
            except subprocess.TimeoutExpired:
                problem = f"did not end within {deadline_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            output.seek(0)
            tail = output.read().splitlines()[-TAIL_LINES:]
    return None if problem is None else "\n".join([problem, *(f"    {line}" for line in tail)])


def main() -> int:
    """Run the blocks of the given pages, or of all pages that have tested blocks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for a block")
    options = parser.parse_args()
    root: Path = options.root
    pages = options.pages or [path for glob in PAGES for path in sorted(root.glob(glob))]
    wrong = bad_links(root)
    print("".join(f"{each}\n" for each in wrong), end="", flush=True)
    failed = count = 0
    for block in [block for page in pages for block in blocks_of(page)]:
        started = time.monotonic()
        problem = run(block, options.deadline)
        path = block.path.relative_to(root) if block.path.is_relative_to(root) else block.path
        seconds = time.monotonic() - started
        print(f"{path}:{block.line}: {problem or 'ok'} ({seconds:.1f} s)", flush=True)
        count += 1
        failed += problem is not None
    print(f"docs: {count - failed} of {count} code blocks work")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
