# SPDX-License-Identifier: Apache-2.0
"""Records of interruptions and their text; small helpers for log lines."""

import logging
import logging.handlers
import random

import pytest

from nvidia_resiliency_ext.inprocess import utils
from nvidia_resiliency_ext.inprocess.attribution import (
    Interruption,
    InterruptionRecord,
    format_interruption_records,
)
from nvidia_resiliency_ext.inprocess.state import State


def test_kinds_keep_their_order() -> None:
    """The members of `Interruption` are the contract's, in its order."""
    assert [kind.name for kind in Interruption] == [
        "EXCEPTION", "BASE_EXCEPTION", "SOFT_TIMEOUT", "HARD_TIMEOUT", "TERMINATED",
        "UNRESPONSIVE", "MONITOR_PROCESS_EXCEPTION",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", Interruption)
def test_record_survives_its_text(kind) -> None:
    """What `str` wrote `from_str` reads, for each kind, also among others."""
    record = InterruptionRecord(1234567, kind)
    assert str(record) == repr(record)
    assert InterruptionRecord.from_str(str(record)) == record


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rank=1",
        "Interruption.EXCEPTION",
        "rank=x, Interruption.EXCEPTION",
        "rank=-1, Interruption.EXCEPTION",
        "rank=٣, Interruption.EXCEPTION",
        "rank=" + "9" * 11 + ", Interruption.EXCEPTION",
        "rank=1, Interruption.NOTHING",
        "rank=1, Interruption.exception",
        "rank=1, Interruption.EXCEPTIONS",
        "frank=1, Interruption.EXCEPTION",
        "rank=1, Interruption.__members__",
    ],
)
def test_malformed_record_is_refused(text) -> None:
    """What names no rank or no kind is a ValueError that quotes it."""
    with pytest.raises(ValueError, match="is no record"):
        InterruptionRecord.from_str(text)


def test_any_text_is_a_record_or_refused() -> None:
    """No text makes `from_str` fail in another way, and none yields what it does not say."""
    random.seed(7)
    pieces = ["rank=", "Interruption.", "EXCEPTION", "1", "٣", ",", "\0", ">", " ", "\n", "é", "_"]
    for _ in range(5000):
        text = "".join(random.choices(pieces, k=random.randint(0, 12)))
        try:
            record = InterruptionRecord.from_str(text)
        except ValueError:
            continue
        assert f"rank={record.rank}" in text or "rank=1" in text
        assert str(record.interruption) in text


def test_records_are_grouped_by_kind() -> None:
    """Each kind is named once, in a fixed order, with its ranks, each once."""
    records = [
        InterruptionRecord(5, Interruption.TERMINATED),
        InterruptionRecord(2, Interruption.EXCEPTION),
        InterruptionRecord(1, Interruption.EXCEPTION),
        InterruptionRecord(2, Interruption.EXCEPTION),
    ]
    text = "Interruption.EXCEPTION on ranks={1, 2}, Interruption.TERMINATED on ranks={5}"
    assert format_interruption_records(records) == text
    assert format_interruption_records(iter(records)) == text
    assert format_interruption_records([]) == ""


def test_rank_sets() -> None:
    """Verbose sets shorten runs, brief ones show both ends and the total."""
    assert utils.format_rank_set_verbose([]) == utils.format_rank_set_brief([]) == "{}"
    assert utils.format_rank_set_verbose({5, 3, 2, 1}) == "{1-3, 5}"
    assert utils.format_rank_set_brief({5, 3, 2, 1}) == "{1, 2, 3, 5}"
    brief = utils.format_rank_set_brief(range(64))
    assert brief == "{0, 1, 2, 3 ... 60, 61, 62, 63} (total: 64)"
    assert utils.format_rank_set_brief(range(5), max_show=3) == "{0, 1 ... 4} (total: 5)"
    with pytest.raises(ValueError, match="max_show=1"):
        utils.format_rank_set_brief([1], max_show=1)


@pytest.mark.parametrize("value", ["true", "1", "YES", " on "])
def test_rank_format_is_chosen_by_the_environment(monkeypatch, value) -> None:
    """The environment asks for verbose sets; nothing or another word keeps them brief."""
    monkeypatch.setenv("NVRX_LOG_RANK_FORMAT_VERBOSE", value)
    assert utils.format_rank_set(range(3)) == "{0-2}"
    monkeypatch.setenv("NVRX_LOG_RANK_FORMAT_VERBOSE", "no")
    assert utils.format_rank_set(range(3)) == "{0, 1, 2}"


def test_torch_version() -> None:
    """Versions are compared as numbers; builds before and after a release count as it."""
    torch = pytest.importorskip("torch")
    seen = torch.__version__
    for present, version, older in [
        ("2.4.1", "2.5", True),
        ("2.10.0", "2.9.1", False),
        ("2.6.0a0+ecf3bae40a.nv25.01", "2.6.0", False),
        ("2.6", "2.6.0", False),
        ("2.6.0+cu126", "2.6.1", True),
    ]:
        torch.__version__ = present
        try:
            assert utils.torch_older_than(version) is older, (present, version)
            with pytest.raises(ValueError, match="not a version"):
                utils.torch_older_than("newest")
        finally:
            torch.__version__ = seen


class Unprintable(Exception):  # noqa: N818
    """Has a representation that fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_exceptions_in_one_line() -> None:
    """Causes follow their effects, hidden ones do not, and nothing makes the text fail."""
    cause, effect = ValueError("a\nb"), KeyError("x")
    effect.__cause__ = cause
    assert utils.format_exc(effect) == r"KeyError('x') <- ValueError('a\nb')"
    cause.__context__ = effect  # a circle
    assert utils.format_exc(effect) == r"KeyError('x') <- ValueError('a\nb')"
    hidden = KeyError("y")
    hidden.__context__ = cause
    assert utils.format_exc(hidden).endswith(r"<- KeyError('x')")
    hidden.__suppress_context__ = True
    assert utils.format_exc(hidden) == "KeyError('y')"
    assert utils.format_exc(Unprintable()) == "Unprintable(?)"
    assert len(utils.format_exc(ValueError("x" * 100_000))) < 3000


def test_line_of_an_exception() -> None:
    """The line names the rank, given as a number or in a state, and where it was."""
    assert utils.log_exc(3, ValueError(1), "abort") == "rank=3 abort: ValueError(1)"
    assert utils.log_exc(State(2, 4), ValueError(1), "abort") == "rank=2 abort: ValueError(1)"
    assert utils.log_exc(State(2, 4).freeze(), ValueError(1), "x").startswith("rank=2 x")


def test_execution_is_logged(caplog) -> None:
    """Beginning and end are logged on level DEBUG, also as a decorator, and failures as such."""
    caplog.set_level(logging.DEBUG, "nvrx")
    with utils.log_exec("abort"):
        pass
    with pytest.raises(KeyError), utils.log_exec(test_rank_sets):
        raise KeyError("x")
    utils.log_exec("decorated")(lambda: None)()
    texts = [record.getMessage().rpartition(" after")[0] for record in caplog.records[1::2]]
    assert texts == ["abort ended", "test_rank_sets failed", "decorated ended"]


def test_nearest_handler() -> None:
    """The handler nearest to a logger is found, as far as its records go."""
    parent, child = logging.getLogger("nvrx_test"), logging.getLogger("nvrx_test.child")
    handler = logging.NullHandler()
    parent.addHandler(handler)
    try:
        assert utils.find_nearest_handler(child, logging.NullHandler) is handler
        assert utils.find_nearest_handler(child, logging.handlers.SysLogHandler) is None
        child.propagate = False
        assert utils.find_nearest_handler(child, logging.NullHandler) is None
    finally:
        parent.removeHandler(handler)
        child.propagate = True


def test_logging_is_left_alone() -> None:
    """Initialising logging installs no handler: programs set up their own."""
    before = [list(logging.getLogger(name).handlers) for name in ("", "nvrx")]
    utils.Logging.initialize()
    utils.Logging.deinitialize()
    assert [list(logging.getLogger(name).handlers) for name in ("", "nvrx")] == before
