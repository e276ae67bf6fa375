# SPDX-License-Identifier: Apache-2.0
"""`ft_launcher --check` and `--print-config`."""

import json
import os
import socket
from pathlib import Path

import ports
import pytest
import ranks_of_node

from nvidia_resiliency_ext.fault_tolerance._cli.check import NodeReport, compare, nodes_finding
from nvidia_resiliency_ext.fault_tolerance._cli.check_local import (
    exit_code_of,
    failed,
    json_within,
    passed,
    render,
    skipped,
)
from nvidia_resiliency_ext.fault_tolerance.launcher import main

pytestmark = pytest.mark.slow

LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"


def run(capsys, *words):
    """Run the launcher here; return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.fixture
def script(tmp_path):
    """Return the path of a script that must not run."""
    path = tmp_path / "train.py"
    path.write_text("open('ran', 'w')\n")
    return str(path)


def checks(out):
    """Return status and text of each check by name."""
    return {item["name"]: (item["status"], item["text"]) for item in json.loads(out)["checks"]}


# --- --print-config ------------------------------------------------------------------------------


def test_each_option_is_shown_with_who_gave_it(capsys, tmp_path, clean_environment):
    """Default, line of the file, flag and variable are told apart; no script is needed."""
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance:\n  lease: 7\n  safety_factor: 4\n")
    clean_environment.setenv("PET_MAX_RESTARTS", "6")
    words = ("--print-config", "--json", f"--ft-cfg-path={path}", "--ft-safety-factor", "3")
    code, out, _ = run(capsys, *words)
    options = {item["name"]: item for item in json.loads(out)["options"]}
    assert code == 0

    def shown(name):
        return options[name]["value"], options[name]["source"]

    assert shown("--ft-lease") == (7.0, f"{path} line 2")
    assert shown("--ft-safety-factor") == (3.0, "command line")
    assert shown("--max-restarts") == (6, "environment PET_MAX_RESTARTS")
    assert shown("--ft-monitor-mode") == ("shared", "default")
    assert shown("--ft-preempt-signal") == (None, "default")


def test_the_plain_form_has_one_line_for_each_option(capsys, clean_environment):
    """Headings, and below them flag, value and source."""
    clean_environment.setenv("NVRX_LOG_DEBUG", "1")
    _, out, _ = run(capsys, "--print-config", "--nnodes=2:3")
    lines = [line.split() for line in out.splitlines()]
    assert ["--nnodes", "2:3", "command", "line"] in lines
    assert ["--ft-log-level", "10", "environment", "NVRX_LOG_DEBUG"] in lines


def test_a_wrong_file_is_a_usage_error(capsys, tmp_path, clean_environment):
    """What cannot be read is not shown: one line, exit code 2."""
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance: {leese: 7}\n")
    code, out, err = run(capsys, "--print-config", f"--ft-cfg-path={path}")
    assert (code, out) == (2, "")
    assert "leese" in err


# --- --check on one node -------------------------------------------------------------------------


def test_a_job_that_can_run_passes_and_nothing_is_started(
    capsys, script, tmp_path, monkeypatch, clean_environment
):
    """Exit code 0, a line for each check, no worker, and nothing is left in the directories."""
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    code, out, _ = run(capsys, "--check", "--json", f"--log-dir={logs}", script)
    found = checks(out)
    assert code == 0, found
    assert found["configuration"][0] == "pass"
    assert found["directory: logs and record"] == ("pass", f"{logs}, it will be made")
    assert found["other nodes"][0] == "skipped"
    assert not (tmp_path / "ran").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_what_is_missing_fails_by_name(capsys, script, tmp_path, clean_environment):
    """A port in use, a directory that is a file, a service and a token that are not there."""
    file = tmp_path / "file"
    file.write_text("x")
    token = tmp_path / "token"
    token.write_text("t")
    token.chmod(0o644)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, _ = run(
            capsys,
            *("--check", "--json", f"--master-port={port}", f"--log-dir={file}/logs"),
            f"--ft-per-cycle-applog-prefix={tmp_path}/job.log",
            "--ft-attribution-endpoint=http://127.0.0.1:1",
            f"--ft-rdzv-token-file={token}",
            "--ft-preempt-deadline=slurm",
            script,
        )
    found = checks(out)
    assert code == 1
    bad = {name for name, (status, _) in found.items() if status == "fail"}
    assert bad == {
        "master port",
        "directory: logs and record",
        "attribution service",
        "file: token",
        "end of the job",
    }
    assert str(port) in found["master port"][1]


def test_a_wrong_command_line_is_a_usage_error(capsys, clean_environment):
    """As without `--check`: one line, exit code 2."""
    code, out, err = run(capsys, "--check", "/no/script.py")
    assert (code, out) == (2, "")
    assert "/no/script.py" in err


def test_findings_are_lines_or_json():
    """One line per check in columns, and 1 as soon as one failed."""
    found = [passed("a", "well"), skipped("bb", "off"), failed("c", "two\nlines")]
    assert (
        render(found, as_json=False)
        == "pass     a   well\nskipped  bb  off\nfail     c   two lines\n"
    )
    assert exit_code_of(found) == 1
    assert exit_code_of(found[:2]) == 0


# --- across nodes --------------------------------------------------------------------------------


def test_differences_are_named_with_their_nodes():
    """Versions, options and clocks that differ fail, with value and host."""
    reports = [
        NodeReport("a", {"torch": "2.4"}, {"--ft-lease": "5.0"}, (), 100.0),
        NodeReport("b", {"torch": "2.4"}, {"--ft-lease": "5.0"}, (), 100.2),
        NodeReport("c", {"torch": "2.5"}, {"--ft-lease": "1.0"}, ("directory: x",), 130.0),
    ]
    found = {finding.name: (finding.status, finding.text) for finding in compare(reports)}
    assert found["versions of all nodes"] == ("fail", "torch is 2.4 on a, b and 2.5 on c")
    assert found["options of all nodes"] == ("fail", "--ft-lease is 1.0 on c and 5.0 on a, b")
    assert found["clocks"][0] == "fail"
    assert "c is 30.0 s ahead; synchronise" in found["clocks"][1]
    assert found["on c"] == ("fail", "directory: x")
    alike = [finding.status for finding in compare(reports[:2])]
    assert alike == ["pass", "pass", "pass"]


def test_a_failure_of_any_node_counts():
    """Who compares many nodes names those that fail, wherever they stand in the list."""
    reports = [NodeReport(f"n{number}", clock=1.0) for number in range(30)]
    reports[25] = NodeReport("n25", failures=("GPU 3: gone",), clock=1.0)
    found = [(finding.name, finding.status) for finding in compare(reports)]
    assert ("on n25", "fail") in found


def test_too_few_nodes_fail():
    """Fewer than the least number cannot begin; fewer than all may."""
    reports = [NodeReport("a"), NodeReport("b")]
    assert nodes_finding(reports, 2, 3, 5.0).status == "pass"
    assert nodes_finding(reports, 3, 3, 5.0).status == "fail"
    missing = compare([NodeReport("a", {"torch": "2"}, clock=1.0), NodeReport("b")])
    assert [finding.status for finding in missing[:3]] == ["fail", "pass", "fail"]


def test_what_a_node_tells_is_shortened_and_not_cut():
    """A report of any size fits into the store as one JSON document, the short texts whole."""
    report = {
        "host": "a",
        "settings": {"--ft-lease": "5.0", "--ft-x": "\u00e9" * 100_000},
        "failures": [f"{number}: {'x' * 5000}" for number in range(100)],
    }
    reported = json_within(report, 4000)
    assert len(reported) <= 4000
    read = json.loads(reported)
    assert read["host"] == "a"
    assert read["settings"]["--ft-lease"] == "5.0"
    assert read["settings"]["--ft-x"].endswith("... (100000 characters)")
    assert read["failures"][0].startswith("0: xx")
    assert json.loads(json_within(report, 10**9)) == report


def test_nodes_meet_and_say_the_same(script, tmp_path):
    """Two launchers meet through the store; what differs is named on both, and both exit 1."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("NVRX_", "FT_", "PET_"))}
    program = Path(__file__).parent / "programs" / "check_of_node.py"
    with ports.claimed() as same, ports.claimed() as different, ranks_of_node.started(
        tmp_path,
        4,
        program,
        [
            json.dumps([f"--rdzv-endpoint=127.0.0.1:{port}", f"--ft-lease={lease}", script])
            for port, lease in ((same, 1), (same, 1), (different, 1), (different, 2))
        ],
        environ,
    ) as launchers:  # fmt: skip
        codes = launchers.wait(120)
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(4)]
    found = [checks(log.partition("REPORT\n")[2]) for log in logs]
    assert all(one["nodes"][0] == "pass" for one in found), logs
    options = [one["options of all nodes"] for one in found]
    assert options[0] == options[1]
    assert options[2] == options[3]
    assert [options[0][0], options[2][0]] == ["pass", "fail"]
    assert "--ft-lease is 1.0 on" in options[2][1]
    assert codes == [0, 0, 1, 1]
