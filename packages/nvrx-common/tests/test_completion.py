# SPDX-License-Identifier: Apache-2.0
"""Completion by real shells, as users have it after `eval "$(PROGRAM --print-completion bash)"`."""

import argparse
import shutil
import subprocess

import pytest

from nvidia_resiliency_ext.shared_utils.completion import (
    SHELLS,
    PrintCompletion,
    completion_script,
)


def make_parser(*, has_script):
    """Return a parser with flags of all kinds."""
    parser = argparse.ArgumentParser("my-tool", allow_abbrev=False)
    parser.add_argument("--prewarm", metavar="{auto,on,off}")
    parser.add_argument("--level", "-l", choices=["low", "high"])
    parser.add_argument("--safe", metavar="BOOL")
    parser.add_argument("--port-number", "--port_number", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--print-completion", action=PrintCompletion)
    if has_script:
        parser.add_argument("script", nargs="?")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


@pytest.fixture(params=SHELLS)
def complete(request, tmp_path):
    """Give what a shell offers for a command line; its last word is the one that is completed."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"{request.param} is not installed")

    bash = request.param == "bash"

    def ask(*words, has_script=True):
        (tmp_path / "load").write_text(
            completion_script(make_parser(has_script=has_script), request.param)
        )
        text = (
            '. "$1"; shift\n'
            + ("emulate sh\n" if request.param == "zsh" else "set -u\n")
            + 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _my_tool\n'
            + 'for word in "${COMPREPLY[@]:-}"; do echo "$word"; done'
        )
        norc = ["-f"] if request.param == "zsh" else ["--norc"]
        done = subprocess.run(
            [shell, *norc, "-c", text, shell, str(tmp_path / "load"), "my-tool", *words],
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == ""
        # zsh itself keeps those that fit, bash leaves that to the function.
        return sorted(w for w in done.stdout.split() if bash or w.startswith(words[-1]))

    return ask


def test_flags_are_completed_with_dashes(complete):
    """All that begin so, in the spelling with dashes alone."""
    assert complete("--p") == ["--port-number", "--prewarm", "--print-completion"]
    assert complete("--json", "--le") == ["--level"]
    assert "--help" in complete("--")


def test_values_that_are_words_are_completed(complete):
    """After a flag, and behind an equals sign as bash and zsh split it; others are file names."""
    assert complete("--prewarm", "o") == ["off", "on"]
    assert complete("-l", "") == ["high", "low"]
    assert complete("--safe", "t") == ["true"]
    assert complete("--prewarm=of") == ["--prewarm=off"]
    assert complete("--port-number", "--") == []


@pytest.mark.parametrize("complete", ["bash"], indirect=True)
def test_bash_splits_words_at_the_equals_sign(complete):
    """A flag, the sign and its value are three words to bash."""
    assert complete("--prewarm", "=", "a") == ["auto"]
    assert complete("--prewarm", "=") == ["auto", "off", "on"]
    assert complete("--port-number", "=", "29", "--js") == ["--json"]


def test_words_of_the_script_are_the_scripts(complete):
    """From the first word that is no flag and no value on, nothing of ours is offered."""
    assert complete("--port-number", "29", "--js") == ["--json"]
    assert complete("--json", "train.py", "--js") == []
    assert complete("path", "--js", has_script=False) == ["--json"]


def test_the_flag_prints_and_leaves(capsys):
    """A shell that is not known is an error that names those that are."""
    parser = make_parser(has_script=True)
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--print-completion", "bash", "--unknown"])
    assert left.value.code == 0
    assert "complete -o default -F _my_tool my-tool" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--print-completion", "fish"])
    assert left.value.code == 2
    assert "bash" in capsys.readouterr().err
    with pytest.raises(ValueError, match="bash, zsh"):
        completion_script(parser, "fish")
