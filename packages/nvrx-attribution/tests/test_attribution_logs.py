# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - texts of logs, and patterns for them, stay on one line
"""Logs: which fault was first, who had it, where it was, and what is done about it."""

import fcntl
import io
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import attribution_cases
import attribution_logs
import attribution_traces
import attribution_write_registry
import hypothesis
import hypothesis.strategies as st
import pytest

from nvidia_resiliency_ext.attribution import cli, engine
from nvidia_resiliency_ext.attribution._core.errors import RegistryError, UnreadableInputError
from nvidia_resiliency_ext.attribution._logs import scanner
from nvidia_resiliency_ext.attribution._logs.following import GrowingLog, LogFollower
from nvidia_resiliency_ext.attribution._policy.history import Attempt, load_history, save_attempt

STEP = (
    "iteration {}/ 500 | consumed samples: 64 | lm loss: 2.1E+00 | number of nan iterations: 0 |\n"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
REAL = Path(__file__).with_name("recorded_logs")


def verdict_of(text, **kwargs):
    """Analyse a text."""
    data = text if isinstance(text, bytes) else text.encode()
    return engine.analyze(io.BytesIO(data), **kwargs)


@pytest.mark.parametrize("kind", [*attribution_logs.FAULTS, *attribution_logs.HEALTHY])
def test_generated_logs(kind):
    """Code, action, rank, node and line of every kind of fault are right, in any dialect."""
    for seed in range(1000, 1003):
        case = attribution_logs.make_case(kind, seed)
        found = verdict_of(case.text)
        assert (found.reason_code, found.action in case.actions) == (case.code, True), seed
        if case.line is not None:
            assert abs(found.first_fault.line - case.line) <= 5, seed
        if case.rank is not None:
            assert found.first_fault.rank in {case.rank, None}, seed
        if case.has_node:
            assert found.first_fault.node == case.node, seed


def test_example_set(tmp_path):
    """The set in `tests/cases` is what its generator writes, and every label of it is met."""
    attribution_cases.write(tmp_path / "cases")
    made = {path.relative_to(tmp_path / "cases") for path in tmp_path.rglob("*") if path.is_file()}
    kept = attribution_cases.FOLDER
    assert made == {path.relative_to(kept) for path in kept.rglob("*") if path.is_file()}
    assert all(
        (kept / path).read_bytes() == (tmp_path / "cases" / path).read_bytes() for path in made
    )
    for path in sorted((kept / "logs").glob("*.log")):
        label = json.loads(path.with_suffix(".json").read_text())
        found = engine.analyze(path)
        fault = found.first_fault
        assert found.reason_code == label["code"], path
        assert (found.domain, found.action in label["actions"]) == (label["domain"], True), path
        assert label["line"] is None or abs(fault.line - label["line"]) <= 5, path
        assert not label["ranks"] or fault.rank in {*label["ranks"], None}, path
        assert not label["nodes"] or [fault.node] == label["nodes"], path
    for folder in sorted((kept / "histories").iterdir()):
        kept_attempts = tmp_path / f"{folder.name}.jsonl"
        actions = [
            engine.analyze(log, history=kept_attempts, job_id="j", cycle_id=cycle).action
            for cycle, log in enumerate(sorted(folder.glob("*.log")))
        ]
        assert actions == json.loads((folder / "label.json").read_text())
    for folder in sorted((kept / "traces").iterdir()):
        label = json.loads((folder / "label.json").read_text())
        report = engine.fr_report_of(str(folder))
        assert {key: report[key] for key in label} == label, folder


@pytest.mark.parametrize("path", sorted(REAL.glob("*.log")), ids=lambda path: path.stem)
def test_logs_of_real_jobs(path):
    """What real torch jobs on CPU printed when they failed is understood."""
    label = json.loads(path.with_suffix(".json").read_text())
    found = engine.analyze(path)
    assert (found.reason_code, found.action) == (label["code"], label["action"])
    assert found.first_fault.rank in {label["rank"], None}


def test_bundled_registry():
    """The rules' own examples hold, no pattern is slow, and JSON and TOML say the same."""
    registry = engine.load_registry()
    assert registry.check() == []
    bundled = attribution_write_registry.FOLDER / "bundled.json"
    assert bundled.read_text() == attribution_write_registry.bundled()


def write_rules(path, *rules):
    """Write an overlay file."""
    path.write_text(json.dumps({"version": "site.1", "rule": list(rules)}))
    return path


SITE = {
    "id": "site.gremlin",
    "code": "storage.io_error",
    "role": "root",
    "anchors": ["gremlin"],
    "pattern": r"gremlin in bay (?P<bay>\w+)",
    "examples": ["a gremlin in bay 7", "E: gremlin in bay X"],
    "counterexamples": ["gremlins", "no gremlin here"],
}


def test_overlay(tmp_path):
    """A site's file adds a rule and disables another; a wrong one is named with file and rule."""
    registry = engine.load_registry(write_rules(tmp_path / "site.json", SITE))
    assert verdict_of("a gremlin in bay 7\n", registry=registry).reason_code == "storage.io_error"
    assert registry.version.endswith("+site.1")
    off = write_rules(tmp_path / "off.json", {"id": "user.import_error", "disable": True})
    found = verdict_of("ImportError: x\n", registry=engine.load_registry(off))
    assert found.reason_code == "user.exception"
    for change, message in (
        ({"code": "gpu.gremlin"}, "not a known reason code"),
        ({"pattern": "(a+)+b"}, "repeats what repeats"),
        ({"pattern": "("}, "site.gremlin"),
        ({"role": "boss"}, "none of root"),
        ({"examples": ["nothing", "here"]}, "does not match"),
        ({"counterexamples": ["one"]}, "at least two"),
        ({"anchors": ["abc"], "examples": ["abc"]}, "under 4 letters"),
        ({"patern": "x"}, "unknown key 'patern'"),
        ({"confidence": "high"}, "confidence 'high' is no number"),
        ({"confidence": 7}, "no number from 0 to 1"),
        ({"specificity": True}, "specificity True is no whole number"),
        ({"source": "moon"}, "source 'moon' is none of any"),
        ({"phase": "lunch"}, "phase 'lunch' is none of startup"),
        ({"needs_block": "yes"}, "needs_block is not true or false"),
        ({"frames": [["gpu.oom"]]}, "frames is not a list of pairs"),
        ({"frames": [["gpu.gremlin", "x"]]}, "not a known reason code"),
        ({"frames": [["gpu.oom", "("]]}, "site.gremlin"),
        ({"since": 1}, "since is not a text"),
        ({"confirms": ["gpu.gremlin"]}, "'gpu.gremlin' is not a known"),
        ({"entity": "shelf"}, "entity 'shelf' is no group"),
        ({"rank_group": "who"}, "rank_group 'who' is no group"),
        ({"disable": "no"}, "disable is not true or false"),
    ):
        with pytest.raises(RegistryError, match=message):
            engine.load_registry(write_rules(tmp_path / "bad.json", {**SITE, **change}))


@pytest.mark.parametrize(
    ("function", "early", "late"),
    [
        ("validate_args", ("user.config_error", "STOP"), ("user.exception", "RESTART")),
        ("save_checkpoint", ("ckpt.save_failed", "RESTART"), ("ckpt.save_failed", "RESTART")),
        ("train", ("user.exception", "RESTART"), ("user.exception", "RESTART")),
    ],
)
def test_functions_tell_the_code(function, early, late):
    """Where an exception came from tells its code, and a configuration is wrong from the start."""
    text = (
        "[rank1]: Traceback (most recent call last):\n"
        f'[rank1]:   File "/app/run.py", line 3, in {function}\n'
        "[rank1]: AssertionError: seven is odd\n"
    )
    for before, expected in (("", early), (STEPS, late)):
        found = verdict_of(before + text)
        assert (found.reason_code, found.action) == expected


def test_overlay_names_rank_node_and_data(tmp_path):
    """Groups of a site's pattern say who had the fault, where, and with which data."""
    texts = [f"gremlin in bay {n} of host n{n} at peer {n} with shard s-{n}.bin" for n in (1, 2)]
    rule = {
        **SITE,
        "pattern": r"gremlin in bay \d+ of host (?P<where>\S+) at peer (?P<who>\d+)"
        r" with shard (?P<what>\S+)",
        "rank_group": "who",
        "node_group": "where",
        "entity": "what",
        "phase": "checkpoint_load",
        "examples": texts,
    }
    registry = engine.load_registry(write_rules(tmp_path / "site.json", rule))
    found = verdict_of("[rank9]: " + texts[0] + "\n", registry=registry)
    assert (found.first_fault.rank, found.first_fault.node) == (1, "n1")
    assert found.entity == {"kind": "artifact", "id": "s-1.bin"}
    assert found.phase == "checkpoint_load"
    rule |= {"pattern": rule["pattern"].replace("<what>", "<data_position>")}
    registry = engine.load_registry(
        write_rules(tmp_path / "site.json", {**rule, "entity": "data_position"})
    )
    found = verdict_of(texts[0] + "\n", registry=registry)
    assert found.entity == {"kind": "data_position", "id": "s-1.bin"}


@pytest.mark.parametrize(
    "line",
    [
        '{"message": "CUDA out of memory.", "rank": 99999999999999999999999}',
        '{"message": "CUDA out of memory.", "rank": "\u00b2"}',
        "0000-01-01 10:00:00,000 ERROR CUDA out of memory.",
        "[rank9999999]: CUDA out of memory.",
        "9999999: CUDA out of memory.",
    ],
)
def test_impossible_numbers_of_a_prefix(line):
    """A rank or year that cannot be is left out; the line still counts."""
    found = verdict_of((line + "\n") * 1000)
    assert (found.reason_code, found.first_fault.rank) == ("gpu.oom", None)
    assert found.events[0].ranks == ""


def test_root_beats_cascade_whatever_the_order():
    """A root that is flushed after its cascade is still first, by time."""
    text = (
        "3: 2026-01-02 10:00:05,000 ERROR recvValue failed on SocketImpl: Connection was closed\n"
        "2: 2026-01-02 10:00:06,000 ERROR OSError: [Errno 5] Input/output error: '/a/b'\n"
        "1: 2026-01-02 10:00:01,000 ERROR RuntimeError: CUDA error: uncorrectable ECC error\n"
    )
    found = verdict_of(text)
    assert (found.reason_code, found.first_fault.rank, found.first_fault.line) == (
        ("gpu.ecc_uncorrectable", 1, 3)
    )
    assert [event.role for event in found.events if event.code == "net.store_lost"] == ["cascade"]


def test_recovered_fault_is_none():
    """A fault after which the job made two steps is reported as recovered, not as the cause."""
    error = "[rank1]: OSError: [Errno 5] Input/output error: '/a/b'\n"
    text = STEP.format(1) + error + STEP.format(2) + STEP.format(3) + STEP.format(4)
    found = verdict_of(text)
    assert found.first_fault is None
    assert [event.role for event in found.events] == ["recovered"]
    again = verdict_of(text + error)
    assert again.reason_code == "storage.io_error"
    assert again.first_fault.line == 6


def test_symptom_is_confirmed_by_the_kernel():
    """The kernel's line about a killed process explains the bare exit by signal 9."""
    exit_line = "failed (exitcode: -9) local_rank: 2 (pid: 4242) of binary: /usr/bin/python\n"
    assert verdict_of(exit_line).reason_code == "host.sigkill"
    kernel = (
        "Jan  2 10:00:00 n7 kernel: Memory cgroup out of memory: Killed process 4242 (python)\n"
    )
    found = verdict_of(exit_line + kernel)
    assert (found.reason_code, found.first_fault.node) == ("host.oom", "n7")


def test_silent_rank():
    """The rank that does not report the timeout of all others is the suspect, with its node."""
    line = "[rank{0}]:[E0102 10:00:00.1 a.cpp:1] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 600001 milliseconds before timing out.\n"
    text = "".join(line.format(rank) for rank in range(8) if rank != 5) + "world size: 8\n"
    found = verdict_of(text, rank_map={5: "n1"})
    assert (found.suspect_ranks, found.first_fault.rank, found.suspect_nodes) == ((5,), 5, ("n1",))


def test_mass_failure_blames_no_node():
    """A fault of most ranks is the program's: it stops the job and excludes nothing."""
    text = "world size: 8\n" + "".join(
        f"[n{rank // 4}:{rank % 4}] Traceback (most recent call last):\n"
        f'[n{rank // 4}:{rank % 4}]   File "/app/t.py", line 3, in f\n'
        f"[n{rank // 4}:{rank % 4}] KeyError: 'x'\n"
        for rank in range(8)
    )
    found = verdict_of(text)
    assert (found.reason_code, found.action, found.exclude_nodes) == ("user.code_error", "STOP", ())


def test_advice_is_no_fault():
    """Advice, zero counters, retries and quoted verdicts are never a cause."""
    text = (
        "CUDA kernel errors might be asynchronously reported at some other API call\n"
        "check: 0 errors, nan_count=0\n"
        "Connection timed out, retrying in 5 s after ReadTimeout\n"
        '{"schema": "nvrx_attribution.v1", "reason_code": "gpu.oom", "text": "CUDA out of memory"}\n'
        "INFO nvrx: attribution: verdict STOP for /l/job_cycle0.log: gpu.oom: before any step was"
        " completed: another start meets the same\n"
        "INFO nvrx: job 7 (ada, train, FAILED): STOP: user.import_error: another start meets the same\n"
    )
    assert verdict_of(text).first_fault is None


def test_repeats_and_budgets(tmp_path):
    """The same fault without progress stops at its budget; progress resets; another does not count."""
    error = STEP.format(7) + "[rank1]: RuntimeError: CUDA error: an illegal memory access was\n"
    error = error.replace("was", "was encountered")
    path = tmp_path / "history.jsonl"
    actions = [
        verdict_of(error, history=path, job_id="j", cycle_id=cycle).action for cycle in range(3)
    ]
    assert actions == ["RESTART", "STOP", "STOP"]
    same = verdict_of(error, history=path, job_id="j", cycle_id=1)
    assert (same.action, same.retry.used, same.retry.exhausted) == ("STOP", 1, True)
    assert same.to_restart_agent_response()["decision_basis"] == "retry_budget_exhausted"
    assert verdict_of(error, history=path, job_id="other", cycle_id=1).action == "RESTART"
    further = error.replace("iteration 7/", "iteration 9/")
    assert verdict_of(further, history=path, job_id="j", cycle_id=3).action == "RESTART"
    database = tmp_path / "history.db"
    for cycle in range(2):
        last = verdict_of(error, history=database, job_id="j", cycle_id=cycle)
    assert last.action == "STOP"
    earlier = [verdict_of(error).to_dict()]
    assert verdict_of(error, history=earlier).action == "STOP"
    path.write_text("nonsense\n" + path.read_text() + '{"half')
    assert verdict_of(error, history=path, job_id="j", cycle_id=9).retry.used >= 1


def test_first_occurrences():
    """What the table says of a first occurrence holds, before and after the first step."""
    assert verdict_of(OOM).action == "STOP"
    assert verdict_of(STEP.format(1) + OOM).action == "RESTART"
    xid = "Jan  2 10:00:00 n7 kernel: NVRM: Xid (PCI:0000:3b:00): {}, pid=1, text\n"
    found = verdict_of(xid.format(79))
    assert (found.action, found.exclude_nodes) == ("RESTART", ("n7",))
    assert verdict_of(xid.format(94)).exclude_nodes == ()
    assert verdict_of(xid.format(63)).first_fault is None
    assert verdict_of("hello\n").confidence <= 0.3
    assert verdict_of("").action == "UNKNOWN"
    assert verdict_of("[after training is done] x\n").action == "CONTINUE"


STEPS = "".join(f"[rank3]: iteration {n}/ 500 | lm loss: 2.3E+00 |\n" for n in range(1, 6))
PEERS = "".join(
    f"[rank{rank}]:[E1123 10:00:0{rank}.000 ProcessGroupNCCL.cpp:1182] [Rank {rank}] To avoid data"
    " inconsistency, we are taking the entire process down.\n"
    for rank in (0, 1, 3)
)


def _cases(name):
    """Return the labelled logs of a file with one JSON object a line."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


REWORDED = _cases("reworded_failures.jsonl")


@pytest.mark.parametrize("case", REWORDED, ids=lambda case: case["name"])
def test_reworded_failures(case):
    """Failures as other tools and versions word them get their code, rank and action."""
    text = case["text"].replace("{steps}", STEPS).replace("{cascade}", PEERS)
    found = verdict_of(text)
    assert found.reason_code in case["codes"]
    assert found.action in case["actions"]
    assert case["rank"] in {None, found.first_fault and found.first_fault.rank}


HEALTHY = (Path(__file__).parent / "healthy_lines.txt").read_text().splitlines()
TIMEOUT = (
    "[rank2]:[E1123 10:00:00.000 ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600013"
    " milliseconds before timing out.\n"
)


@pytest.mark.parametrize("line", HEALTHY)
def test_healthy_lines_accuse_nobody(line):
    """A line of a job that is well is no fault, and hides none that follows."""
    assert verdict_of(f"{STEPS}[rank1]: {line}\n{STEPS}").first_fault is None
    alone = verdict_of(f"[rank1]: {line}\n")
    assert (alone.first_fault, alone.action) == (None, verdict_of("[rank1]: hello\n").action)
    for before in ("", STEPS):
        found = verdict_of(f"{before}[rank1]: {line}\n{TIMEOUT}")
        assert (found.reason_code, found.action) == ("nccl.timeout", "RESTART")


def test_failures_written_without_knowing_the_rules():
    """Of 850 failing logs in 53 kinds nearly all get the right code, action and rank."""
    cases = _cases("written_failures.jsonl")
    right = {"code": 0, "action": 0, "rank": 0}
    stopped = []
    for case in cases:
        found = verdict_of("\n".join(case["lines"]) + "\n")
        rank = found.first_fault and found.first_fault.rank
        right["code"] += found.reason_code == case["code"]
        right["action"] += found.action == case["action"]
        right["rank"] += case["rank"] in {None, rank}
        if (case["action"], found.action) == ("RESTART", "STOP"):
            stopped.append(case["id"])
    shares = {name: count / len(cases) for name, count in right.items()}
    assert shares["code"] >= 0.95, shares
    assert shares["action"] >= 0.98, shares
    assert shares["rank"] >= 0.97, shares
    assert stopped == []


@pytest.mark.parametrize(
    ("writer", "code", "action", "rank"),
    [
        ("fg", 0.82, 0.9, 0.88),
        ("fh", 0.93, 0.98, 0.96),
        ("fi", 0.87, 0.95, 0.88),
        ("fj", 0.93, 0.98, 0.9),
        ("fk", 0.9, 0.93, 0.93),
    ],
)
def test_failures_that_nothing_was_made_for(writer, code, action, rank):
    """Of logs from which no rule or word was learned nearly all get code, action and rank."""
    cases = [case for case in _cases("unseen_failures.jsonl") if case["id"].startswith(writer)]
    found = [verdict_of("\n".join(case["lines"]) + "\n") for case in cases]
    pairs = list(zip(cases, found, strict=True))
    assert sum(f.reason_code == c["code"] for c, f in pairs) / len(cases) >= code
    assert sum(f.action == c["action"] for c, f in pairs) / len(cases) >= action
    ranks = [f.first_fault and f.first_fault.rank for f in found]
    assert (
        sum(c["rank"] in {None, r} for c, r in zip(cases, ranks, strict=True)) / len(cases) >= rank
    )
    infrastructure = (
        "gpu.off",
        "gpu.e",
        "gpu.n",
        "gpu.g",
        "net.",
        "storage.io",
        "sched.p",
        "sched.n",
    )
    stopped = [
        c["id"] for c, f in pairs if f.action == "STOP" and c["code"].startswith(infrastructure)
    ]
    assert stopped == []


XID = "n1 kernel: NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\n"


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("[rank0]: supervisor: worker rank 2 returned status 5\n", 2),
        ("[rank0]: ranks disagree on collective #5 of group tp1: 0,1,3 called all_gather, 2 called reduce_scatter\n", 2),
        (XID + "[n1:6] [rank14]: hello, world size 16\n[n1:3] CUDA error: unspecified launch failure\n", 11),
        (XID + "coordinator: rank 22 left the group, draining\n", 22),
        (XID + "srun: error: n1: task 13: Aborted (core dumped)\n", 13),
        (XID + "[rank5]: CUDA error: unspecified launch failure\n", 5),
    ],
    ids=["end", "odd one", "number on its node", "departed", "ended", "next complaint"],
)  # fmt: skip
def test_rank_of_a_line_that_another_wrote(text, rank):
    """A fault that a supervisor or the kernel reports is that of the rank it happened to."""
    assert verdict_of(text).first_fault.rank == rank


OOM = "CUDA out of memory. Tried to allocate 2.00 GiB\n"
LABELLED = {
    "word": "sail 7 ready\nsail 2 ready\nsail 2 {fault}sail 7 lost touch with 2\n",
    "name and mark": "[kiln/0] lit\n[oven/5] lit\n[kiln/5] {fault}[oven/0] no reply from 5\n",
    "key": '{"ts":"10:00:01","src":"a","lane":9,"n":4}\n{"ts":"10:00:02","src":"a","lane":3,"n":4}\n'
    '{"ts":"10:00:03","src":"a","lane":9,"text":"{fault}"}\n',
    "number first": "06| up\n01| up\n06| {fault}01| partner of 06 closed\n",
    "report": "berth/4 up\nberth/1 up\nharbour: card of crew 4: {fault}berth/1 waits for 4\n",
    "blame of others": "cask 3 up\ncask 8 up\n{fault}cask 3 has lost 8\ncask 1 has lost 8\n",
}
SHOWN = {
    "word": 2,
    "name and mark": 5,
    "key": 9,
    "number first": 6,
    "report": 4,
    "blame of others": 8,
}


@pytest.mark.parametrize("kind", LABELLED)
def test_ranks_that_no_prefix_says(kind):
    """Numbers at the begin of lines that go up and down are those of the ranks that write them."""
    fault = OOM.strip() if kind == "key" else OOM
    assert verdict_of(LABELLED[kind].replace("{fault}", fault)).first_fault.rank == SHOWN[kind]


@pytest.mark.parametrize(
    "text",
    [
        "lap 20 took 3 s\nlap 21 took 3 s\nlap 21 {fault}lap 21 is the last\n",
        "oak3 up\n[4] lit\n{fault}",
        "cask 3 up\ncask 8 up\n{fault}cask 3 has lost 8\ncask 8 has lost 3\n",
        "INFO train.py:101 up\nINFO model.py:44 up\nINFO train.py:77 go\nERROR train.py:131 {fault}",
        "[INFO] [launch.py:132] up\n[INFO] [engine.py:55] up\n[ERROR] [engine.py:91] {fault}",
        "dgx python[4321]: up\ndgx python[4323]: up\ndgx python[4320]: up\ndgx python[4323]: {fault}",
        "dgx-12: up\ndgx-17: up\ndgx-12: ready\ndgx-17: {fault}",
        "[tp0 pp1 dp3] up\n[tp1 pp0 dp2] up\n[tp0 pp0 dp0] up\n[tp1 pp1 dp3] {fault}",
        (
            "a:4000:5000 [0] NCCL INFO up\nb:4003:5003 [3] NCCL INFO up\nb:4000:5000 [0] NCCL INFO up\n"
            "b:4003:5003 [3] NCCL WARN Cuda failure 'out of memory'\n"
        ),
        "[1] up\n[0] up\n[3] up\nTraceback (most recent call last):\nValueError: expected 3 channels\n",
        "up\nTraceback (most recent call last):\nIndexError: index 5 is out of bounds for dimension 0\n",
    ],
    ids=[
        *("counter", "host", "two accused", "lines of files", "lines of files in brackets"),
        *("processes", "hosts", "coordinates", "devices", "text", "index"),
    ],
)
def test_unclear_numbers_name_no_rank(text):
    """Numbers that may be counters, hosts, processes, places or indices say no rank."""
    assert verdict_of(text.replace("{fault}", OOM)).first_fault.rank is None


@pytest.mark.parametrize(
    "after",
    [
        (
            "[rank0]: waiting 30 s (limit 600.0 s)\n[rank1]: waiting 60 s (limit 600.0 s)\n"
            "[rank0]: waiting 90 s (limit 600.0 s)\n"
        ),
        "gpu temp 61 C power 301.5 W\ngpu temp 62 C power 300.5 W\ngpu temp 63 C power 302.1 W\n",
        "agent heartbeat tick 5\nagent heartbeat tick 6\nagent heartbeat tick 7\n",
        "flusher background 1\nflusher background 2\nflusher background 3\n",
        (
            '{"ts": 1714560010, "rate": 0.0}\n{"ts": 1714560020, "rate": 0.0}\n'
            '{"ts": 1714560030, "rate": 0.0}\n'
        ),
        "round 4 merged\nround 5 merged\n",
    ],
    ids=["waits", "figures", "heartbeats", "background", "times", "one step"],
)
def test_counts_of_what_goes_on_beside_a_dead_rank_heal_nothing(after):
    """Only two steps after a fault tell that the job went on; waits and figures grow without it."""
    found = verdict_of("[rank3]: " + OOM + after)
    assert (found.reason_code, found.first_fault and found.first_fault.rank) == ("gpu.oom", 3)


def test_steps_in_other_words_tell_that_a_fault_was_survived():
    """A job that counts on after a fault has no fault."""
    assert (
        verdict_of(
            "[rank3]: " + OOM + "".join(f"round {n} merged\n" for n in (4, 5, 6))
        ).first_fault
        is None
    )
    steps = "".join(f"chunk {n} eaten, bits 1.31\n" for n in range(11, 14))
    assert (
        verdict_of(steps + "[rank3]: " + OOM + steps.replace("chunk 1", "chunk 2")).first_fault
        is None
    )


def test_skipped_lines_are_not_counted_twice():
    """Where an attempt's log begins later, its first lines are not taken for two kinds of lines."""
    scanner = engine.LogScanner()
    scanner.skip(10_000, 500)
    scanner.feed(f"lap 20 took 3 s\nlap 21 took 3 s\nlap 21 {OOM}lap 21 is the last\n".encode())
    assert scanner.finish().first_fault.rank is None


def test_one_long_line_is_read_in_time():
    """A line of letters alone costs what its length says."""
    began = time.process_time()
    verdict_of(OOM + "a" * 30_000 + "\n" + OOM)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("lines", "action"),
    [
        ("round 4 merged\nround 5 merged\n", "RESTART"),
        ("chunk 1,204 eaten, bits 1.31\nchunk 1,205 eaten, bits 1.30\n", "RESTART"),
        ("block 2 built in 1.31 s\nblock 3 built in 1.30 s\n", "STOP"),
        ("shard 104 read, 1.31 s\nshard 105 read, 1.30 s\n", "STOP"),
        ("10:00:01.5 warm\n10:00:02.7 warm\n", "STOP"),
    ],
    ids=["word", "measured", "building", "loading", "clock"],
)
def test_growing_counts_are_steps(lines, action):
    """Steps in words of a tool's own count: a line comes again and its number has grown."""
    assert verdict_of(lines + "[rank1]: " + OOM).action == action


def test_one_report_of_a_timeout_accuses_its_writer():
    """Who is told to dump is not behind when only one rank has reported a timeout."""
    told = "[rank5]: Received a dump signal due to a collective timeout from rank 2\n"
    assert verdict_of(TIMEOUT + told).first_fault.rank == 2


OWN_WORDS = "[rank1]: nodeguard: card 3 vanished from PCIe, lspci shows rev ff\n"


def test_words_that_no_rule_knows():
    """The words of the last lines tell a code, once the log has ended, and say so."""
    found = verdict_of(STEPS + OWN_WORDS)
    assert (found.reason_code, found.action, found.first_fault.rank) == (
        "gpu.off_bus",
        "RESTART",
        1,
    )
    assert 0.15 <= found.confidence < 1.0
    assert found.explanation.startswith("no rule matches the line")
    growing = engine.LogScanner()
    growing.feed((STEPS + OWN_WORDS).encode())
    assert growing.snapshot().reason_code == "unknown"
    later = STEPS.replace("iteration ", "iteration 1")
    assert verdict_of(STEPS + OWN_WORDS + later).first_fault is None
    assert verdict_of(STEPS + OWN_WORDS + TIMEOUT).reason_code == "gpu.off_bus"
    assert verdict_of(STEPS + OWN_WORDS + XID).explanation == verdict_of(XID).explanation


@pytest.mark.parametrize(("probability", "action"), [(0.39, "RESTART"), (0.41, "STOP")])
def test_words_end_a_job_only_when_they_are_sure(monkeypatch, probability, action):
    """A code that stops jobs does so only when its words leave little doubt."""
    monkeypatch.setattr(scanner, "guess", lambda *_, **__: ("user.config_error", probability))
    found = verdict_of("some words\n")
    assert (found.reason_code, found.action) == ("user.config_error", action)


def test_every_code_of_the_words_is_known():
    """The model names codes of the table, and each of its weights belongs to one of them."""
    model = json.loads((attribution_write_registry.FOLDER / "words.json").read_text())
    codes = engine.load_registry().codes
    assert set(model["codes"]) <= codes.keys()
    assert len(model["biases"]) == len(model["codes"]) + 1
    assert all(
        0 <= code < len(model["biases"]) for row in model["words"].values() for code, _ in row
    )


# Its trainer prints no number of a step, so nothing tells that the job went on.
WITHOUT_STEPS = "hd033"


@pytest.mark.parametrize("case", _cases("written_healthy.jsonl"), ids=lambda case: case["id"])
def test_healthy_logs_written_without_knowing_the_rules(case):
    """Pieces of healthy runs that speak of errors accuse nobody and stop nothing."""
    found = verdict_of("\n".join(case["lines"]) + "\n")
    assert found.action != "STOP"
    assert found.first_fault is None or case["id"] == WITHOUT_STEPS


@pytest.mark.parametrize("end", [TIMEOUT, "srun: error: node7: task 3: Killed\n"])
def test_steps_after_the_end_take_it_back(end):
    """A job that makes steps after a line about its end, and then fails, was not done."""
    on = STEPS.replace("iteration ", "iteration 1")
    assert verdict_of(f"{STEPS}Training finished\n{on}{end}").action == "RESTART"
    for text in (f"{STEPS}Training finished\n{on}", f"{STEPS}Training finished\n{end}"):
        assert verdict_of(text).action == "CONTINUE"


def test_log_and_traces_together(tmp_path):
    """Traces name the rank of a log that has only timeouts; their agreement raises confidence."""
    job = attribution_traces.make_job("host_stuck", 16, 1)
    folder = str(attribution_traces.write(job, tmp_path / "fr"))
    timeout = (
        "Watchdog caught collective operation timeout: ran for 6 milliseconds before timing out"
    )
    found = verdict_of(f"[rank1]: {timeout}\n", fr_path=folder)
    assert (found.reason_code, list(found.suspect_ranks)) == ("nccl.timeout", job.guilty)
    assert found.fr["kind"] == "host"
    cause = f"[rank{job.guilty[0]}]: RuntimeError: CUDA error: uncorrectable ECC error\n"
    assert verdict_of(cause, fr_path=folder).confidence > verdict_of(cause).confidence
    job = attribution_traces.make_job("wrong_size", 16, 1)
    folder = str(attribution_traces.write(job, tmp_path / "mismatch"))
    found = verdict_of(f"[rank1]: {timeout}\n", fr_path=folder)
    assert (found.reason_code, found.action) == ("user.collective_mismatch", "STOP")
    assert verdict_of(OOM, fr_path=str(tmp_path)).fr is None


def test_secrets_are_removed():
    """Keys, tokens and credentials of a quoted line are taken out."""
    text = "requests.exceptions.ConnectionError: https://me:pw123@host/x token=abcdefgh12345678"
    text += f" WANDB_API_KEY={'k' * 40} invalid token zyxwvuts9876\n"
    quoted = json.dumps(verdict_of(text).to_dict())
    assert "pw123" not in quoted
    assert "abcdefgh1234" not in quoted
    assert "k" * 40 not in quoted
    assert "zyxwvuts" not in quoted


def test_same_input_same_verdict():
    """The verdict depends on the bytes and not on how they come in."""
    case = attribution_logs.make_case("ib", 5)
    whole = verdict_of(case.text).to_dict()
    for size in (1, 7, 4096):
        scanner = engine.LogScanner()
        data = case.text.encode()[:20_000] if size == 1 else case.text.encode()
        expected = verdict_of(data).to_dict() if size == 1 else whole
        for start in range(0, len(data), size):
            scanner.feed(data[start : start + size])
        assert {**scanner.finish().to_dict(), "elapsed_s": 0} == {**expected, "elapsed_s": 0}


BAD = {
    "binary": bytes(range(256)) * 4000,
    "nul": b"\0" * 3_000_000,
    "one_line": b"error " * 2_000_000,
    "no_newline": b"[rank3]: CUDA out of memory",
    "invalid_utf8": b"[rank3]: \xff\xfe RuntimeError: CUDA out of memory \xc3\n" * 100,
    "identical": b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 1\n'
    * 30_000,
    "carriage": b"step 1 error\r" * 300_000,
    "braces": b'{"log": ' * 200_000,
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", BAD)
def test_hostile_logs(name):
    """Binary, endless and repeated logs end in bounded time and memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    found = verdict_of(BAD[name])
    assert time.process_time() - started < 60
    assert found.coverage["bytes"] == len(BAD[name])
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 160
    assert len(json.dumps(found.to_dict())) < 100_000


def test_log_of_many_faces():
    """Of a log in which no line is like another so many are told apart, and no more."""
    scanner = engine.LogScanner()
    words = (bytes(97 + (n // 26**k) % 26 for k in range(5)) for n in range(25_000))
    scanner.feed(b"".join(b"RuntimeError: %s broke\n" % word for word in words))
    assert scanner.finish().coverage["lines"] == 25_000
    result = scanner._scanner.result
    assert (len(result.events), result.dropped_events) == (20_000, 5_000)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_gigabyte_without_a_newline():
    """A line of a gigabyte is read in bounded memory, and what follows it is understood."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scanner = engine.LogScanner()
    chunk = b"error in x " * (1 << 16)
    for _ in range((1 << 30) // len(chunk) + 1):
        scanner.feed(chunk)
    scanner.feed(b"\n" + OOM.encode())
    found = scanner.finish()
    assert found.reason_code == "gpu.oom"
    assert found.coverage["bytes"] > 1 << 30
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 160


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from([OOM.encode(), STEP.encode(), b"  exitcode  : -9 (pid: 1)\n"]),
            st.text(max_size=80).map(lambda text: f"[rank3]: {text}Error: x\n".encode()),
        ),
        max_size=30,
    )
)
def test_any_bytes_give_a_verdict(pieces):
    """No bytes make the engine fail, and every verdict has all its forms."""
    found = verdict_of(b"".join(pieces))
    assert found.action in {"STOP", "RESTART", "CONTINUE", "UNKNOWN"}
    json.dumps(found.to_dict())
    json.dumps(found.to_restart_agent_response())
    assert found.to_item().raw_text.count("\n") == 4


def test_limits(tmp_path):
    """A log can be cut by size or time; what cannot be read is named."""
    text = STEP.format(1) * 100 + OOM
    assert verdict_of(text, max_bytes=200).coverage["truncated"]
    assert verdict_of(text, deadline_s=0.0).coverage["truncated"]
    with pytest.raises(UnreadableInputError, match="No such file"):
        engine.analyze(tmp_path / "none")
    with pytest.raises(UnreadableInputError, match="rank map"):
        verdict_of(text, rank_map=tmp_path / "none")
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text(STEP.format(1))
    second.write_text(OOM)
    assert engine.analyze([first, second]).first_fault.line == 2


def test_program(tmp_path, capsys):
    """The program prints verdicts, rules and reasons; its exit codes are those documented."""
    log = tmp_path / "job.log"
    log.write_text("hello\n" + OOM)
    assert cli.main(["analyze", str(log)]) == 0
    assert capsys.readouterr().out.startswith("STOP: gpu.oom")
    assert cli.main(["analyze", str(log), "--json", "--exit-code-by-action"]) == 10
    assert json.loads(capsys.readouterr().out)["schema"] == "nvrx_attribution.v1"
    assert cli.main(["analyze", str(tmp_path / "none")]) == 3
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    assert cli.main(["analyze", str(log), "--registry", str(bad)]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert cli.main(["registry", "list"]) == 0
    assert cli.main(["registry", "check"]) == 0
    assert cli.main(["registry", "explain", "gpu.oom"]) == 0
    assert cli.main(["registry", "test", str(log)]) == 0
    assert "2: gpu.oom" in capsys.readouterr().out
    assert cli.main(["registry", "explain", "gpu.om"]) == 2
    assert "did you mean gpu.oom" in capsys.readouterr().err
    assert cli.main(["explain", f"{log}:2"]) == 0
    assert "rule gpu.oom -> gpu.oom (root)" in capsys.readouterr().out
    capsys.readouterr()
    for place in (str(log), f"{log}:²", f"{log}:{'9' * 5000}"):
        assert cli.main(["explain", place]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["explain", f"{log}:99"]) == 3
    with pytest.raises(SystemExit, match="2"):
        cli.main(["analyse"])


@pytest.mark.timeout(120)
def test_following_through_a_link(tmp_path):
    """Growth is seen when the log is a link to a file of another directory."""
    (tmp_path / "there").mkdir()
    real = tmp_path / "there" / "job.log"
    real.touch()
    link = tmp_path / "job.log"
    link.symlink_to(real)
    with LogFollower(str(link)) as follower:
        chunks = follower.chunks()  # without an end: growth that is missed is waited for
        assert next(chunks) == b""  # it has settled
        real.write_text("grown\n")
        assert next(chunks) == b"grown\n"


def grown(follower):
    """Return what a follower yields until it has settled."""
    return b"".join(iter(lambda: next(follower), b""))


@pytest.mark.timeout(120)
def test_following_over_what_happens_between_two_looks(tmp_path):
    """A log that was cut and is longer again, or cut under a writer that does not append, is new."""
    log = tmp_path / "job.log"
    log.write_text("step: 1\n" * 10 + "[rank1]: half a")
    with LogFollower(str(log)) as follower:
        chunks = follower.chunks()
        assert grown(chunks).endswith(b"half a")
        log.write_text("step: 2\n" * 100)
        assert grown(chunks) == b"\n" + b"step: 2\n" * 100
        with log.open("r+") as writer:
            writer.seek(0, os.SEEK_END)
            writer.write("step: 3\n")
            writer.flush()
            assert grown(chunks) == b"step: 3\n"
            os.truncate(log, 0)
            writer.write("step: 4\n" * 200)
        assert grown(chunks).lstrip(b"\0") == b"step: 4\n" * 200


def test_last_lines_before_a_rotation_are_read(tmp_path):
    """What a writer adds between the last look at a log and its replacement is not lost."""
    log = tmp_path / "job.log"
    log.write_text("first\n")

    def find():
        if not (tmp_path / "job.log.1").exists():
            with log.open("a") as file:
                file.write("last\n")
            log.rename(tmp_path / "job.log.1")
            log.write_text("next\n")
        return os.stat(log)

    growing = GrowingLog(lambda: os.open(log, os.O_RDONLY), find)
    assert [growing.read() for _ in range(4)] == [b"first\n", b"last\n", b"next\n", b""]
    growing.close()


def test_moved_log_is_read_until_the_next_one_has_bytes(tmp_path):
    """What a writer adds to a file that was moved away is read while the new file is empty."""
    log, moved = tmp_path / "job.log", tmp_path / "job.log.1"
    log.write_text("first\n")
    growing = GrowingLog(lambda: os.open(log, os.O_RDONLY), lambda: os.stat(log))
    assert growing.read() == b"first\n"
    log.rename(moved)
    log.touch()
    assert growing.read() == b""
    with moved.open("a") as file:
        file.write("last\n")
    assert growing.read() == b"last\n"
    log.write_text("next\n")
    assert growing.read() == b"next\n"
    growing.close()


def test_log_that_vanishes_before_it_is_opened_is_waited_for(tmp_path):
    """A new file that is gone again at the moment of its opening leaves the old one open."""
    log = tmp_path / "job.log"
    log.write_text("first\n")

    def find():
        log.rename(tmp_path / "job.log.1")
        log.write_text("next\n")
        found = os.stat(log)
        log.unlink()
        return found

    growing = GrowingLog(lambda: os.open(log, os.O_RDONLY), find)
    assert (growing.read(), growing.read()) == (b"first\n", b"")
    assert growing.descriptor >= 0
    growing.close()


def test_log_that_cannot_be_read_is_no_wait(tmp_path, capsys):
    """Following a directory, a pipe or a loop of links ends with one line, not with a wait."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "pipe", "loop"):
        assert cli.main(["analyze", "--follow", str(tmp_path / name)]) == 3
        assert capsys.readouterr().err.count("\n") == 1


def test_histories_of_programs_at_once(tmp_path):
    """Attempts that several programs add at the same time are all kept."""
    path = str(tmp_path / "history.jsonl")
    code = (
        "import sys\nfrom nvidia_resiliency_ext.attribution._policy.history import *\n"
        "for cycle in range(8): save_attempt(sys.argv[1], Attempt(sys.argv[2], cycle, 'f'))"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code, path, f"job{n}"]) for n in range(4)]
    assert [job.wait(120) for job in jobs] == [0] * 4
    for number in range(4):
        assert len(load_history(path, f"job{number}", None)) == 8
    with open(f"{path}.lock", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process"):
            save_attempt(path, Attempt("job", 0, "f"), timeout_s=0.1)


PROGRAM = [sys.executable, "-m", "nvidia_resiliency_ext.attribution"]


@pytest.mark.parametrize("name", ["history.jsonl", "history.db"])
def test_full_disk_of_the_history(tmp_path, name):
    """A history that takes no more costs one line, not the verdict; one left empty is begun."""
    log = tmp_path / "job.log"
    log.write_text(STEP.format(7) + "[rank0]: Segmentation fault (core dumped)\n")
    (tmp_path / name).touch()  # by a program that was killed
    # -B: or half a compiled module would be left, too.
    program = [sys.executable, "-B", *PROGRAM[1:]]
    command = [*program, "analyze", str(log), "--history", str(tmp_path / name), "--cycle-id"]

    def run(cycle, limit):
        return subprocess.run(
            [*command, str(cycle), "--job-id", "j"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )

    full = run(0, 16)
    assert (full.returncode, full.stderr.count("\n")) == (0, 1), full.stderr
    assert full.stdout.startswith("RESTART: host.segfault")
    assert "is not added to the history" in full.stderr
    found = [run(cycle, resource.RLIM_INFINITY) for cycle in (1, 2)]
    assert [done.stdout.split(":")[0] for done in found] == ["RESTART", "STOP"]
    assert [done.stderr for done in found] == ["", ""]


def test_followed_attempts_count(tmp_path, capsys):
    """An attempt whose log was followed is in the history; a history without a job is refused."""
    log = tmp_path / "job.log"
    log.write_text(STEP.format(7) + "[rank0]: Segmentation fault (core dumped)\n")
    history = ["--history", str(tmp_path / "h.jsonl")]
    followed = ["analyze", "--follow", "--quiet-s", "0.1", str(log), *history]
    for cycle in (0, 1):
        assert cli.main([*followed, "--job-id", "j", "--cycle-id", str(cycle)]) == 0
    assert "STOP: host.segfault" in capsys.readouterr().out
    assert cli.main(["analyze", str(log), *history]) == 2
    assert "--history needs --job-id" in capsys.readouterr().err


@pytest.mark.parametrize("notices", ["1", "0"])
def test_following(tmp_path, notices):
    """A verdict comes soon after the last byte, over a truncation and a rotation of the log."""
    log = tmp_path / "job.log"
    command = [sys.executable, "-m", "nvidia_resiliency_ext.attribution", "analyze", str(log)]
    env = {**os.environ, "NVRX_FORCE_NO_INOTIFY": "0" if notices == "1" else "1"}
    with subprocess.Popen(
        [*command, "--follow", "--json", "--quiet-s", "8"], stdout=subprocess.PIPE, env=env
    ) as program:
        timer = threading.Timer(50, program.kill)
        timer.start()
        assert json.loads(program.stdout.readline())["action"] == "UNKNOWN"
        log.write_text(STEP.format(1))
        assert json.loads(program.stdout.readline())["reason_code"] == "unknown"
        with log.open("a") as file:
            file.write("[rank2]: OSError: [Errno 28] No space left on device\n")
        assert json.loads(program.stdout.readline())["reason_code"] == "storage.no_space"
        log.rename(tmp_path / "job.log.1")
        lines = [STEP.format(step) for step in range(2, 6)]
        log.write_text(
            "".join(lines) + "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error\n"
        )
        assert json.loads(program.stdout.readline())["reason_code"] == "gpu.ecc_uncorrectable"
        program.stdout.read()
        timer.cancel()
    assert program.returncode == 0
