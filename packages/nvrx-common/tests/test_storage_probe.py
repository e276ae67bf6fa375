# SPDX-License-Identifier: Apache-2.0
"""The storage probe names what is wrong with a path, waits for nobody, and takes no path for an
option.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import storage_probe

_SOURCE = str(Path(storage_probe.__file__).parents[2])
_COMMAND = [sys.executable, "-S", "-m", storage_probe.__name__]
_CLEAN: dict[str, list[object]] = {"invalid": [], "missing": [], "unreadable": []}

probe = storage_probe._storage_path_probe


def _run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*_COMMAND, *arguments],
        env={**os.environ, "PYTHONPATH": _SOURCE},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_good_paths_pass(tmp_path: Path) -> None:
    """Files, directories, links to them, FIFOs (never opened) and skipped entries are in order."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    names = ["", "file", "link", "fifo"]
    assert probe([str(tmp_path / name) for name in names] + [None, ""]) == _CLEAN
    assert probe() == probe([]) == probe(None) == _CLEAN


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        ("relative/path", "invalid"),
        ("--help", "invalid"),
        (5, "invalid"),
        (b"/tmp", "invalid"),
        ("/tmp/nul\0byte", "invalid"),
        ("/nowhere/at/all", "missing"),
        ("/etc/passwd/below", "missing"),
        ("/" + "x" * 300, "unreadable"),
    ],
)
def test_bad_paths_are_sorted(path: object, verdict: str) -> None:
    """Each kind of bad path lands in its own list and in no other."""
    assert probe([path]) == {**_CLEAN, verdict: [path]}


def test_dangling_link_is_missing(tmp_path: Path) -> None:
    """A link to nothing is missing."""
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert probe([str(tmp_path / "link")])["missing"] == [str(tmp_path / "link")]


def test_read_errors_are_unreadable(tmp_path: Path) -> None:
    """What is there and fails when read is unreadable: here a file of the kernel that gives EIO."""
    path = "/proc/self/mem"
    assert probe([path, str(tmp_path)]) == {**_CLEAN, "unreadable": [path]}


def test_write_test(tmp_path: Path) -> None:
    """The write test leaves nothing behind, and names what cannot be written."""
    (tmp_path / "file").write_text("x")
    good = [str(tmp_path), str(tmp_path / "file")]
    assert probe(good, write=True) == {**_CLEAN, "unwritable": []}
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "x"
    assert probe(["/proc"], write=True)["unwritable"] == ["/proc"]


def test_huge_directory_is_not_listed(tmp_path: Path) -> None:
    """A directory with many entries costs what one entry costs."""
    for number in range(20_000):
        os.close(os.open(tmp_path / f"{number}", os.O_CREAT | os.O_WRONLY))
    costs = []
    for _ in range(3):
        start = time.process_time()
        assert len(os.listdir(tmp_path)) == 20_000
        listed = time.process_time()
        assert probe([str(tmp_path)]) == _CLEAN
        costs.append((time.process_time() - listed, listed - start))
    # A collection of garbage, however large the process has become, falls into one of them.
    assert min(probed for probed, _ in costs) < min(listed for _, listed in costs) / 2


@pytest.mark.parametrize(
    ("arguments", "code", "lists"),
    [
        (["/tmp"], 0, {}),
        ([], 0, {}),
        (["--", "--help"], 1, {"invalid": ["--help"]}),
        (["/nowhere", "--help"], 1, {"missing": ["/nowhere"], "invalid": ["--help"]}),
        (["--write", "--", "/proc", "-h"], 1, {"unwritable": ["/proc"], "invalid": ["-h"]}),
    ],
)
def test_program(arguments: list[str], code: int, lists: dict[str, list[str]]) -> None:
    """The program prints the lists as one JSON object, exits 1 if any is filled, without `site`."""
    returned, out, err = _run(*arguments)
    unwritable: dict[str, list[object]] = {"unwritable": []} if "--write" in arguments else {}
    assert json.loads(out) == {**_CLEAN, **unwritable, **lists}
    assert (returned, err) == (code, "")


def test_help_and_unknown_options() -> None:
    """Help is given for `--help` in front only; an unknown option is an error, not a pass."""
    code, out, _ = _run("--help")
    assert (code, out.splitlines()[0][:6]) == (0, "usage:")
    assert "--mount" in out
    code, out, err = _run("--frobnicate", "/tmp")
    assert (code, out) == (2, "")
    assert "--frobnicate" in err


def test_imports_little() -> None:
    """The module brings nothing but the standard library, and no argparse, logging or inspect."""
    program = (
        f"import sys; sys.argv = ['probe', '/tmp']; import {storage_probe.__name__} as m; m.main();"
        "known = sys.stdlib_module_names | {'nvidia_resiliency_ext', '__main__'};"
        "print(sorted({n.partition('.')[0] for n in sys.modules} - known), "
        "[n for n in ('argparse', 'logging', 'inspect', 'subprocess') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env={**os.environ, "PYTHONPATH": _SOURCE},
        capture_output=True, text=True, timeout=150, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[] []"


def test_help_beside_a_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` in front of a path does not make a check pass."""
    assert storage_probe.main(["--help", "/nvrx/none"]) == 2
    assert capsys.readouterr().out == ""
    assert storage_probe.main(["--help"]) == 0
