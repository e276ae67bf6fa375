# SPDX-License-Identifier: Apache-2.0
"""What a program writes when its standard streams are closed, full or nobody reads them."""

import subprocess
import sys

import pytest

IMPORT = "import os, sys\nfrom nvidia_resiliency_ext.shared_utils import console\n"


def run(program: str, redirection: str) -> tuple[int, str]:
    """Run a program with a shell's redirection; return its exit code and stdout and stderr."""
    result = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", IMPORT + program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    return result.returncode, result.stdout


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_stdout_is_no_error(redirection: str) -> None:
    """A result that nobody can see is not written, and the program goes on."""
    assert run("console.write_out('x' * 100_000); sys.exit(7)", redirection) == (7, "")


def test_full_disk_is_one_line_and_exit_code_1() -> None:
    """A result that is lost is said on stderr, once."""
    said = run("console.write_out('x' * 100_000); sys.exit(7)", ">/dev/full")
    assert said == (1, "the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", ">&- 2>/dev/full"])
def test_complaint_that_cannot_be_written_changes_nothing(redirection: str) -> None:
    """The program keeps its own exit code when stderr takes nothing."""
    assert run("console.write_err('x' * 100_000); sys.exit(2)", redirection) == (2, "")


def test_complaint_is_written() -> None:
    """What is written to stderr arrives there."""
    assert run("console.write_err('oh\\n')", ">&-") == (0, "oh\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1), (0, 2), (0, 1, 2)])
def test_closed_streams_become_the_null_device(closed: tuple[int, ...]) -> None:
    """The numbers of closed streams are taken, children inherit them, open ones stay."""
    program = f"""
import subprocess
for descriptor in {closed}:
    os.close(descriptor)
saved = [os.fstat(d) for d in range(3) if d not in {closed}]
console.open_missing_streams()
assert saved == [os.fstat(d) for d in range(3) if d not in {closed}]
null = os.stat(os.devnull).st_rdev
child = "import os, sys; sys.exit(9 if all(os.fstat(d).st_rdev == %d for d in %r) else 1)"
code = child % (null, {closed})
os._exit(subprocess.run([sys.executable, "-c", code], close_fds=True).returncode)
"""
    assert run(program, "")[0] == 9
