# SPDX-License-Identifier: Apache-2.0
"""The report's outputs: text, JSON, page and command line, also for input that means no good."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_job import RecordedJob

from nvidia_resiliency_ext.shared_utils._report.timeline import plain
from nvidia_resiliency_ext.shared_utils.events import (
    CycleEnd,
    CycleStart,
    EventLog,
    Fault,
    FirstStep,
    JobEnd,
    JobStart,
    Verdict,
    WorkerStart,
)
from nvidia_resiliency_ext.shared_utils.report import (
    build_timeline,
    load,
    main,
    render_html,
    render_json,
    render_text,
)

_EVIL = "<script>alert('x')</script>\"&'\x1b[31m\n"


def _story() -> RecordedJob:
    job = RecordedJob(job_id="j<b>").at(0, JobStart(), None).at(1, CycleStart(world_size=2))
    for rank in (0, 1):
        job.at(1, WorkerStart(warm=False, cold_reason=_EVIL), rank=rank)
        job.at(5, FirstStep(dur_s=4.0), rank=rank)
    job.at(50, Fault(cause="killed", what=_EVIL, detail=_EVIL * 20, late_s=0.1), rank=1)
    job.at(51, Verdict(action=_EVIL), rank=1).at(52, CycleEnd(result=_EVIL))
    return job.at(60, JobEnd(result="failed", exit_code=1), None)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a directory with the events of one node."""
    log = EventLog.create(tmp_path / "ev", src="launcher", job_id="7", launch_id="a", host="n1")
    log.record(JobStart(nnodes=1, nproc=1), cycle=None)
    log.record(CycleStart(world_size=1), cycle=0)
    log.record(JobEnd(result="success", exit_code=0), cycle=None)
    log.close()
    return tmp_path / "ev"


def test_text_fits_the_terminal() -> None:
    """No line is wider than asked for, and no control character reaches the terminal."""
    timeline = build_timeline([_story().file()])
    for width in (40, 60, 80, 200):
        text = render_text(timeline, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.replace("\n", "").isprintable()
    assert "goodput 74.8%" in text
    assert "1 node, 2 ranks, 1 cycle, 1 min 00 s, ended: failed (exit code 1)" in text
    assert "killed rank 1 on n1" in text


def test_json_is_complete() -> None:
    """The JSON form is standard JSON and names every kind of time."""
    text = render_json(build_timeline([_story().file()]))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(text, parse_constant=refuse)
    assert found["schema"] == "nvrx_report.v1"
    assert set(found["seconds"]) >= {"productive", "lost_work", "unknown", "detection", "stop"}
    assert found["wall_s"] == pytest.approx(60)
    assert found["faults"][0]["rank"] == 1
    assert found["faults_by_cause"] == {"killed": 1}


class _Page(HTMLParser):
    """Collects the tags of a page and checks that they nest."""

    void = frozenset({"meta", "br", "link", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.urls.extend(value or "" for name, value in attrs if name in {"src", "href", "action"})
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed_and_closed() -> None:
    """The page nests, runs its own script only, and refers to nothing outside itself."""
    page = render_html(build_timeline([_story().file()]))
    parser = _Page()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert parser.tags.count("script") == 1
    assert not parser.urls
    assert "://" not in page
    assert "default-src 'none'" in page
    assert "alert('x')" not in page
    assert "j&lt;b&gt;" in page
    assert parser.tags.count("rect") > 5


def test_page_of_very_many_ranks_stays_small() -> None:
    """With thousands of ranks the page draws some, those with faults first, and says so."""
    job = RecordedJob().at(0, CycleStart(world_size=3000))
    for rank in range(3000):
        job.at(1, FirstStep(), rank=rank)
    job.at(50, Fault(cause="killed", late_s=0.0), rank=2999).at(60, JobEnd(result="failed"), None)
    page = render_html(build_timeline([job.file()]))
    assert "2744 more ranks are not drawn" in page
    assert ">rank 2999<" in page
    assert len(page) < 1_000_000


def test_empty_record_can_be_shown() -> None:
    """A file with nothing but a header gives a report in every form."""
    timeline = build_timeline([RecordedJob().file()])
    assert "Nothing has been recorded" in render_text(timeline)
    assert "Nothing has been recorded" in render_html(timeline)
    assert json.loads(render_json(timeline))["goodput"] is None


def test_command_line(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory or a file gives text, JSON or a page, and exit code 0."""
    (file,) = recorded.iterdir()
    for path in (recorded, file):
        assert main([str(path)]) == 0
        assert "job 7: 1 node, 1 rank" in capsys.readouterr().out
    assert main([str(recorded), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job_id"] == "7"
    page = tmp_path / "r.html"
    assert main([str(recorded), "--html", str(page)]) == 0
    assert capsys.readouterr().out == ""
    assert page.read_text().startswith("<!doctype html>")


def test_unusable_input(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, empty and foreign input, and an unwritable page, are one line and exit code 2."""
    (tmp_path / "empty").touch()
    (tmp_path / "other").write_text("hello\n")
    (tmp_path / "bare").mkdir()
    for name in ("none", "empty", "other", "bare", "none\nx"):
        assert main([str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("nvrx-report: ")
    assert main([str(recorded), "--html", str(tmp_path / "none" / "r.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_module_runs(recorded: Path) -> None:
    """`python -m` works, and a reader that closes early is no error."""
    command = [sys.executable, "-m", "nvidia_resiliency_ext.shared_utils.report"]
    done = subprocess.run(
        [*command, str(recorded)], capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "goodput unknown" in done.stdout
    with subprocess.Popen(
        [*command, str(recorded), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=150) == 0


def test_load_reads_event_files_only(recorded: Path) -> None:
    """Other files in the directory are left alone."""
    (recorded / "failures.jsonl").write_text("{}\n")
    assert [file.host for file in load([str(recorded)])] == ["n1"]


def test_one_bad_file_hides_no_other(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is empty, foreign, a pipe or a broken link is left out and named."""
    (recorded / "events-n2-a.jsonl").touch()
    (recorded / "events-n3-a.jsonl").write_bytes(b"\xff\x00 rubbish\n")
    (recorded / "events-n4-a.jsonl").symlink_to("events-n4-a.jsonl")
    (recorded / "events-n5-a.jsonl").mkdir()
    os.mkfifo(recorded / "events-n6-a.jsonl")
    assert main([str(recorded), "--width", "300"]) == 0
    shown = capsys.readouterr().out
    assert "job 7: 1 node, 1 rank" in shown
    assert shown.count("Left out: ") == 5
    assert "events-n2-a.jsonl: is empty" in shown


def test_links_to_the_page(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link of ours is followed; one that somebody else put into a shared folder is not."""
    page = tmp_path / "page.html"
    own = tmp_path / "own.html"
    own.symlink_to(page)
    assert main([str(recorded), "--html", str(own)]) == 0
    assert own.is_symlink()
    assert page.read_text().startswith("<!doctype html>")
    if os.geteuid():
        return  # only root can make a link of somebody else's
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    page.write_text("precious")
    foreign = shared / "r.html"
    foreign.symlink_to(page)
    os.lchown(foreign, 12345, 12345)
    assert main([str(recorded), "--html", str(foreign)]) == 2
    assert "a link of user 12345 is not followed" in capsys.readouterr().err
    assert page.read_text() == "precious"


def test_reports_that_write_one_file_together(recorded: Path, tmp_path: Path) -> None:
    """Whoever reads the file meanwhile always finds a whole one, and nothing else is left."""
    page = tmp_path / "out" / "page.html"
    page.parent.mkdir()
    assert main([str(recorded), "--html", str(page)]) == 0
    whole = page.read_text()
    command = [sys.executable, "-m", "nvidia_resiliency_ext.shared_utils.report", str(recorded)]
    writers = [subprocess.Popen([*command, "--html", str(page)]) for _ in range(4)]
    while any(writer.poll() is None for writer in writers):
        assert page.read_text() == whole
    assert [writer.returncode for writer in writers] == [0] * 4
    assert list(page.parent.iterdir()) == [page]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` needs no record and names the version."""
    assert main(["--version"]) == 0
    assert re.fullmatch(r"nvrx-report \d+\.\d+\S*\n", capsys.readouterr().out)


def test_record_of_the_environment(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a path the record of NVRX_EVENT_DIR is shown, and without that the usage."""
    monkeypatch.setenv("NVRX_EVENT_DIR", str(recorded))
    assert main([]) == 0
    assert "job 7" in capsys.readouterr().out
    monkeypatch.delenv("NVRX_EVENT_DIR")
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert "NVRX_EVENT_DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(cause="killed", what="signal 9"), "killed rank 1 on n1: signal 9"),
        (Fault(cause="killed", what="rank 1 on host n1 died"), "killed: rank 1 on host n1 died"),
        (
            Fault(cause="exited", what="code 7", detail="exit code 7"),
            "exited rank 1 on n1: exit code 7",
        ),
        (
            Fault(cause="exited", what="code 7", detail="at once"),
            "exited rank 1 on n1: code 7 (at once)",
        ),
        (
            Fault(
                cause="hang_section",
                what="section step",
                detail="rank 1 (pid 7 on n1) section step open",
            ),
            "hang_section: rank 1 (pid 7 on n1) section step open",
        ),
    ],
)
def test_nothing_is_told_twice(fault: Fault, says: str) -> None:
    """What the words of a fault or a restart say already is not said again beside them."""
    job = RecordedJob().at(0, CycleStart(world_size=2, nodes="n1"), 0).at(5, fault, 0, rank=1)
    job.at(6, CycleStart(world_size=2, nodes="n1", reason=fault.what), 1)
    lines = render_text(build_timeline([job.file()]), width=300).splitlines()
    (line,) = [line for line in lines if " cycle 0 " in line]
    assert line.endswith(f" cycle 0 {says}, found by launcher")
    (restart,) = [line for line in lines if "to cycle 1" in line]
    assert restart.count("rank 1") == 1


LONG = "rank 2 on host h sleeps in train.py:9 in step; ranks 0, 1 and 3 waited for it; " * 3


def test_a_long_cause_stands_once_and_is_not_cut() -> None:
    """What hangs is told whole where the fault stands; restarts and cycles only name it."""
    fault = Fault(cause="hang_section", what=LONG.strip(), detail=f"{LONG}limit 3 s")
    job = RecordedJob().at(0, CycleStart(world_size=4), 0).at(5, fault, 0, rank=2)
    job.at(5, CycleEnd(result=LONG.strip()), 0)
    job.at(6, CycleStart(world_size=4, reason=LONG.strip()), 1)
    timeline = build_timeline([job.file()])
    text = render_text(timeline, width=2000)
    assert text.count("waited for it; rank 2") == 2
    assert f"{LONG}limit 3 s" in text
    assert "to cycle 1: hang_section of rank 2, down" in text
    page = render_html(timeline)
    table = page[page.index("<h2>Faults") :]
    assert table.count(f"{LONG}limit 3 s") == 1
    assert table.count("waited for it; rank 2") == 2
    assert table.count("<td>hang_section of rank 2</td>") == 3


def test_text_is_cut_between_words() -> None:
    """A text that is too long ends with a whole word, unless a word alone is too long."""
    assert plain("ending the rank now", 15) == "ending the..."
    assert plain("ending the rank", 15) == "ending the rank"
    assert plain("ending the ranks", 13) == "ending the..."
    assert plain("x" * 30, 15) == "x" * 12 + "..."


def test_an_exit_code_is_said_once() -> None:
    """Where the result is an exit code, it is not put behind it again."""
    for result, says in (("rank 0 ended: exit code 1", ""), ("no restart left", " (exit code 1)")):
        job = RecordedJob().at(0, CycleStart(world_size=1), 0)
        job.at(5, JobEnd(result=result, exit_code=1), None)
        text = render_text(build_timeline([job.file()]), width=200)
        assert f"ended: {result}{says}\n" in text


def test_two_jobs_in_one_folder_are_told_apart() -> None:
    """Their cycles are not joined, also at one time on two hosts; each is told with its file."""
    files = []
    for host, job_id, begin in (("n1", "a", 0), ("n2", "b", 3)):
        job = RecordedJob(host=host, job_id=job_id).at(begin, CycleStart(world_size=2), 0)
        job.at(begin + 9, CycleEnd(result=f"end of {job_id}"), 0)
        job.at(begin + 9, JobEnd(result=f"end of {job_id}", exit_code=0), None)
        files.append(job.file())
    timeline = build_timeline(files)
    assert [cycle.hosts for cycle in timeline.cycles] == [("n1",), ("n2",)]
    text = render_text(timeline, width=300)
    assert text.startswith("jobs a, b: ")
    assert "<h1>jobs a, b</h1>" in render_html(timeline)
    for file, job_id in zip(files, "ab", strict=True):
        (note,) = [note for note in timeline.notes if note.startswith(f"job {job_id}, ")]
        assert f"end of {job_id}" in note
        assert note.endswith(file.path)
    assert render_text(build_timeline(files[:1])).startswith("job a: ")
