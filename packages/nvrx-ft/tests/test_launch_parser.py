# SPDX-License-Identifier: Apache-2.0
"""The command line: every flag in every spelling, the script's own words, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvidia_resiliency_ext.fault_tolerance._config import syntax, values
from nvidia_resiliency_ext.fault_tolerance._config.flags import FLAGS, OLD_SPELLINGS
from nvidia_resiliency_ext.fault_tolerance._config.table import OPTIONS
from nvidia_resiliency_ext.fault_tolerance.cli_args import get_args_parser, parse_args

pytestmark = pytest.mark.usefixtures("clean_launch_environment")

# These print something and leave.
LEAVE = {"version", "print-completion"}
SAMPLES = {
    values.SECTIONS: "step:10",
    values.SIGNAL: "SIGINT",
    values.HANDLED_SIGNAL_OR_NONE: "SIGUSR1",
    values.LOG_LEVEL: "DEBUG",
    values.BOOL: "no",
    syntax.STREAMS: "0:3",
    syntax.CONFIGURATION: "a=b",
    syntax.ENDPOINT: "host:1",
    syntax.SIGNALS: "SIGTERM",
    syntax.RANKS: "0,1",
}


def sample(kind: values.Kind) -> str:
    """Return a text that the kind accepts."""
    if kind in SAMPLES:
        return SAMPLES[kind]
    if kind.expects.startswith("one of "):
        return kind.expects.removeprefix("one of ").split(",")[0]
    for text in ("7", "/sys/{nic}", "os.path"):
        try:
            kind.parse(text)
        except (ValueError, TypeError):
            continue
        return text
    raise AssertionError(kind)


@pytest.fixture
def clean_launch_environment(clean_environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide variables that stand in for flags."""
    for name in list(os.environ):
        if name.startswith(("PET_", "OMP_", "SLURM_")):
            clean_environment.delenv(name)
    return clean_environment


def spellings(flag: Any) -> list[str]:
    names = [f"--{flag.name}", f"--{flag.name.replace('-', '_')}"]
    names.append(f"--{flag.name.replace('-', '_', 1)}")
    if flag.name.startswith("ft-"):
        names.append("--ft-" + flag.name.removeprefix("ft-").replace("-", "_"))
    if flag.short:
        names.append(f"-{flag.short}")
    return list(dict.fromkeys(names))


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.name not in LEAVE], ids=lambda f: f.name)
def test_every_flag_parses_in_every_spelling(flag: Any) -> None:
    """Dashes, underscores and both mixed give the same value; so do a space and an equals sign."""
    seen = set()
    for name in spellings(flag):
        if flag.kind is None:
            lines = [[name]]
        else:
            text = sample(flag.kind)
            lines = [[name, text], [f"{name}={text}"]]
        for line in lines:
            args = parse_args([*line, "script.py", "--x"])
            assert args.training_script == "script.py"
            assert args.training_script_args == ["--x"]
            assert args.given == {flag.attribute: f"--{flag.name}"}
            seen.add(repr(getattr(args, flag.attribute)))
    assert len(seen) == 1
    if flag.kind is None:
        assert seen == {"True"}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_options_are_taken_with_the_oldest_prefix(option: Any) -> None:
    """`--ft-param-FIELD` still sets an option, with one warning that names the present flag."""
    text = sample(option.kind)
    for name in (f"--ft-param-{option.field}", f"--ft-param-{option.field.replace('_', '-')}"):
        args = parse_args([name, text, name, text, "s"])
        assert f"ft_{option.field}" in args.given
        assert len(args.warnings) == 1
        assert f"use --{option.flag}" in args.warnings[0]
    assert f"ft_{option.field}" in parse_args([f"--ft-{option.field}={text}", "s"]).given


@pytest.mark.parametrize("old", [o for o in OLD_SPELLINGS if not o.startswith("ft-param")])
def test_older_names_are_taken_with_one_warning(old: str) -> None:
    """Names of earlier releases set the present flag and say so once."""
    flag = next(flag for flag in FLAGS if flag.name == OLD_SPELLINGS[old])
    words = [f"--{old}"] if flag.kind is None else [f"--{old}", sample(flag.kind)]
    args = parse_args([*words, "s"])
    assert flag.attribute in args.given
    assert len(args.warnings) == 1


def test_deprecated_flags_leave_one_warning_each() -> None:
    """Flags without a meaning parse, and each says what to do instead."""
    deprecated = [flag for flag in FLAGS if flag.deprecated]
    words = [f"--{flag.name}={sample(flag.kind)}" for flag in deprecated if flag.kind]
    assert len(parse_args([*words, "s"]).warnings) == len(deprecated) > 0


@pytest.mark.parametrize(
    "rest",
    [
        ["--", "--x", "--"],
        ["--nproc-per-node", "9"],
        ["--help"],
        ["--version"],
        ["-m", "-r", "3"],
        ["--unknown", "--ft-lease=x"],
        ["", " ", "a b", "\u00e4"],
    ],
    ids=str,
)
def test_the_scripts_words_are_left_alone(rest: list[str]) -> None:
    """All from the script on goes to the script, letter by letter."""
    args = parse_args(["--nproc-per-node", "2", "script.py", *rest])
    assert args.training_script == "script.py"
    assert args.training_script_args == rest
    assert args.nproc_per_node == "2"


def test_two_dashes_end_the_launchers_words() -> None:
    """A script may have a name that looks like a flag."""
    args = parse_args(["--max-restarts=1", "--", "--odd.py", "--", "x"])
    assert args.training_script == "--odd.py"
    assert args.training_script_args == ["--", "x"]


def test_letters_may_share_a_word() -> None:
    """`-mr3` is `-m -r 3`; a value may follow its letter directly."""
    args = parse_args(["-mr3", "-t=1", "pkg.mod", "-m"])
    assert (args.module, args.redirects, args.tee) == (True, "3", "1")
    assert args.training_script_args == ["-m"]


def test_a_negative_number_is_a_value() -> None:
    """A number below zero is not mistaken for a flag."""
    assert parse_args(["--ft-max-no-progress-cycles", "-1", "s"]).ft_max_no_progress_cycles == -1


def test_the_last_of_several_values_wins() -> None:
    """A flag given again replaces its earlier value, in whatever spelling."""
    assert parse_args(["--max-restarts=1", "--max_restarts", "2", "s"]).max_restarts == 2


def test_torchruns_flags_are_all_taken() -> None:
    """Each flag of the installed torch's torchrun parses here, in each of its spellings."""
    from torch.distributed.run import get_args_parser as torch_parser

    samples = {
        "nnodes": "1",
        "nproc_per_node": "1",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "rdzv_conf": "timeout=1",
        "start_method": "fork",
        "redirects": "3",
        "tee": "0:1",
        "local_ranks_filter": "0",
        "signals_to_handle": "SIGTERM",
        "numa_binding": "node",
    }
    for action in torch_parser()._actions:
        for name in action.option_strings:
            if name in ("-h", "--help"):
                continue
            words = [name] if action.nargs == 0 else [name, samples.get(action.dest, "1")]
            args = parse_args([*words, "s"])
            assert args.training_script == "s", name
            assert action.dest in args.given, name


def test_the_parser_knows_every_flag_in_both_spellings() -> None:
    """Whoever asks the parser what it takes finds dashes and underscores, as in torchrun's."""
    from torch.distributed.run import get_args_parser as torch_parser

    known = {word for action in get_args_parser()._actions for word in action.option_strings}
    names = [flag.name for flag in FLAGS]
    assert known >= {f"--{name}" for name in names}
    assert known >= {f"--{name.replace('-', '_')}" for name in names}
    assert known >= {word for action in torch_parser()._actions for word in action.option_strings}


def test_help_shows_each_flag_once(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` has dashes alone; a second spelling of each flag would only be in the way."""
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    words = capsys.readouterr().out.split()
    assert not [word for word in words if word.startswith("--") and "_" in word]


def test_the_flag_for_infrastructure_ranks_is_deprecated() -> None:
    """It still has its effect, and says once that it is not needed."""
    args = parse_args(["--ft-use-infra-group-rank=false", "s"])
    assert args.ft_use_infra_group_rank is False
    assert len(args.warnings) == 1
    assert "--ft-use-infra-group-rank is deprecated" in args.warnings[0]


def test_defaults_are_torchruns_or_the_documented_ones() -> None:
    """Without flags the values are the documented defaults."""
    args = parse_args(["s"])
    expected = {
        "nnodes": "1:1",
        "nproc_per_node": "1",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "",
        "rdzv_id": "none",
        "max_restarts": 0,
        "term_timeout": 1800.0,
        "workers_stop_timeout": 15.0,
        "monitor_interval": 0.3,
        "start_method": "spawn",
        "role": "default",
        "redirects": "0",
        "tee": "0",
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "ft_no_restart_exit_code": 93,
        "ft_log_server_port": 50051,
        "ft_restart_policy": "any-failed",
        "ft_lease": None,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.given == {}
    assert args.warnings == []


def test_the_environment_stands_in_for_a_flag(
    clean_launch_environment: pytest.MonkeyPatch,
) -> None:
    """`PET_` variables give values with the flag's type; a flag wins; an empty one is none."""
    clean_launch_environment.setenv("PET_MAX_RESTARTS", "3")
    clean_launch_environment.setenv("PET_STANDALONE", "1")
    clean_launch_environment.setenv("PET_MODULE", "0")
    clean_launch_environment.setenv("PET_ROLE", "")
    clean_launch_environment.setenv("PET_FT_CFG_PATH", "/x.yaml")
    args = parse_args(["s"])
    assert (args.max_restarts, args.standalone, args.module) == (3, True, False)
    assert (args.role, args.ft_cfg_path) == ("default", "/x.yaml")
    assert args.given["max_restarts"] == "PET_MAX_RESTARTS"
    assert parse_args(["--max-restarts=1", "s"]).max_restarts == 1


@pytest.mark.parametrize(
    ("words", "attribute", "value"),
    [
        (["--nproc_per", "2"], "nproc_per_node", "2"),
        (["--nproc=2"], "nproc_per_node", "2"),
        (["--stand"], "standalone", True),
        (["--master-a=h"], "master_addr", "h"),
        (["--monitor-i", "3"], "monitor_interval", 3.0),
        (["--ft-max-no=1"], "ft_max_no_progress_cycles", 1),
    ],
    ids=str,
)
def test_a_flag_may_be_abbreviated(words: list[str], attribute: str, value: object) -> None:
    """The beginning of one flag stands for it, as under torchrun; torchrun's own flags first."""
    assert getattr(parse_args([*words, "s"]), attribute) == value


def test_none_on_the_command_line_wins_over_a_file() -> None:
    """`none` is kept, since no value at all would mean that the file decides."""
    assert parse_args(["--ft-rank-heartbeat-timeout=none", "s"]).ft_rank_heartbeat_timeout == "none"


BAD: dict[str, tuple[list[str], str]] = {
    "no script": ([], "no script to run; write ft_launcher [options] SCRIPT"),
    "typo": (["--nproc-per-nodes", "2", "s"], "did you mean --nproc-per-node?"),
    "abbreviation": (["--no", "s"], "flag '--no' is short for several: --no-python, --node-rank"),
    "unknown letter": (["-x", "s"], "unknown flag '-x'; see ft_launcher --help"),
    "no value": (["--role"], "--role needs a value: a text"),
    "flag as value": (["--role", "--standalone", "s"], "--role needs a value"),
    "value for a switch": (["--standalone=yes", "s"], "--standalone takes no value, got 'yes'"),
    "workers": (["--nproc-per-node=many", "s"], "'many' is not a number of workers from 1"),
    "no address": (["--master-addr=", "s"], "--master-addr: '' is not HOST or HOST:PORT"),
    "long number": (["--max-restarts", str(2**63), "s"], "is not an integer >= 0 and < 2**63"),
    "no workers": (["--nproc-per-node=0", "s"], "'0' is not a number of workers from 1"),
    "too many workers": (["--nproc-per-node=65537", "s"], "workers from 1 to 65536, cpu, gpu"),
    "nodes": (["--nnodes=3:2", "s"], "'3:2' is not a number of nodes or MIN:MAX"),
    "restarts": (["--max-restarts=-1", "s"], "--max-restarts: '-1' is not an integer >= 0"),
    "backend": (["--rdzv-backend=etcd", "s"], "'etcd' is not one of c10d"),
    "endpoint": (["--rdzv-endpoint=h:p", "s"], "'h:p' is not HOST:PORT"),
    "high port": (
        ["--rdzv-endpoint=h:99999", "s"],
        "'h:99999' is not HOST:PORT with a port up to 65535",
    ),
    "configuration": (["--rdzv-conf=x", "s"], "'x' is not a list like key=value"),
    "streams": (["-r", "4", "s"], "--redirects: '4' is not 0, 1 (stdout), 2 (stderr)"),
    "ranks": (["--local-ranks-filter=a", "s"], "'a' is not a comma separated list of local"),
    "port": (["--master-port=70000", "s"], "'70000' is not an integer from 0 to 65535"),
    "signals": (["--signals-to-handle=SIGKILL", "s"], "signals that can be handled"),
    "bool": (["--ft-check-remaining-processes=on", "s"], "'on' is not one of true, false, yes"),
    "choice": (["--ft-prewarm=maybe", "s"], "'maybe' is not one of auto, on, off"),
    "code": (["--ft-no-restart-exit-code=256", "s"], "is not an integer from 1 to 255"),
    "relative": (["--ft-nvrx-logfile=x", "s"], "'x' is not an absolute path"),
    "two": (["--ft-lease=0", "--tee=9", "s"], "--tee: '9' is not"),
    "line break": (["--role=a", "--ft-lease=x\ny", "s"], "--ft-lease: 'x\\ny' is not"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD.keys())
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake is one line on stderr that names flag, value and remedy."""
    with pytest.raises(SystemExit) as caught:
        parse_args(words)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ft_launcher: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_wrong_variable_is_named(
    clean_launch_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad value in the environment is reported under the variable's name."""
    clean_launch_environment.setenv("PET_MAX_RESTARTS", "few")
    with pytest.raises(SystemExit) as caught:
        parse_args(["s"])
    assert caught.value.code == 2
    assert "PET_MAX_RESTARTS: 'few' is not an integer >= 0" in capsys.readouterr().err


def test_help_lists_every_flag_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` ends with 0 and shows all groups and flags."""
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert not caught.value.code
    text = capsys.readouterr().out
    for group in ("torchrun:", "fault tolerance:", "health:", "logging:", "attribution:"):
        assert f"\n{group}\n" in text
    for flag in FLAGS:
        assert f"--{flag.name}" in text
    assert "before the job fails. Default: 0." in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_the_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--print-completion` ends with 0; flags and their words are in it, older spellings not."""
    with pytest.raises(SystemExit) as left:
        parse_args(["--print-completion", shell])
    assert left.value.code == 0
    script = capsys.readouterr().out
    assert "--ft-prewarm)" in script
    assert '-W "auto on off"' in script
    assert "--ft-lease" in script
    assert "--ft_lease" not in script
    assert "complete -o default -F _ft_launcher ft_launcher" in script


def test_version_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` ends with 0 and lists the distributions and torch, wherever it stands."""
    with pytest.raises(SystemExit) as caught:
        parse_args(["--role=r", "--version"])
    assert not caught.value.code
    text = capsys.readouterr().out
    for name in ("nvrx-ft", "nvrx-common", "torch"):
        assert f"\n{name} " in f"\n{text}"


def test_a_reader_may_leave_early() -> None:
    """`ft_launcher --help | head` ends quietly."""
    program = (
        "from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args\n"
        "import sys; sys.stdin.read(); parse_args(['--help'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        child.stdin.close()
        assert child.stderr.read() == b""
        assert child.wait(30) == 0


LAUNCHER = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-restarts=x", "s"], "--max-restarts: 'x' is not an integer >= 0"),
        (["/no/script.py"], "script '/no/script.py' does not exist"),
        (["--ft-cfg-path=/no/file", __file__], "file '/no/file' does not exist; correct the path"),
        (["--ft-segment=2", __file__], "segment"),
    ],
    ids=["value", "script", "file", "later"],
)
def test_the_program_reports_a_mistake_in_one_line(words: list[str], message: str) -> None:
    """As a program: one line, exit code 2, no traceback."""
    result = subprocess.run(
        [*LAUNCHER, *words], capture_output=True, text=True, timeout=150, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ft_launcher: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_unknown_words_may_be_kept_for_a_caller() -> None:
    """`parse_known_args` hands back what it does not know, as any ArgumentParser does."""
    args, unknown = get_args_parser().parse_known_args(["--mine=1", "--role=r", "s", "--x"])
    assert unknown == ["--mine=1"]
    assert (args.role, args.training_script_args) == ("r", ["--x"])


def test_reading_the_command_line_imports_nothing_heavy() -> None:
    """Help and errors come before torch, yaml, asyncio or another large module is loaded."""
    program = """
import sys
from nvidia_resiliency_ext.fault_tolerance.launcher import main
try:
    main(["--help"])
finally:
    heavy = {"torch", "numpy", "psutil", "yaml", "grpc", "asyncio", "logging", "shutil",
             "inspect", "dataclasses", "importlib.metadata", "pathlib", "difflib", "subprocess"}
    print(*heavy & set(sys.modules), file=sys.stderr)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True
    )
    # Start-up files of the environment may load some before us.
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    loaded = set(result.stderr.split())
    assert loaded - set(bare.stdout.split()) == set()


@pytest.mark.parametrize(
    ("words", "redirection", "code"),
    [
        ("--help", ">&-", 0),
        ("--version", ">&-", 0),
        ("--help", ">/dev/full 2>&-", 1),
        ("--nope", "2>&-", 2),
        ("--nope", "2>/dev/full", 2),
        ("/no/script.py", "2>&-", 2),
        ("--nope", "<&- >&- 2>&-", 2),
        ("--no-python /bin/false", ">&- 2>&-", 1),
        ("--no-python /bin/true", "<&- >&- 2>&-", 0),
    ],
)
def test_closed_streams_change_no_exit_code(
    words: str, redirection: str, code: int, tmp_path: Path
) -> None:
    """Without a place to write to, the program ends as it would with one, and says nothing else."""
    result = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {words} {redirection}', "sh", *LAUNCHER],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert (result.returncode, result.stdout) == (code, "")
