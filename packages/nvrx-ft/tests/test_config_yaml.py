# SPDX-License-Identifier: Apache-2.0
"""Files with a `fault_tolerance` section: what is found, and what is said about bad ones."""

import contextlib
import logging
import os
import random
import threading
import time
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._config import yaml_file
from nvidia_resiliency_ext.fault_tolerance._config.yaml_file import SIZE_LIMIT_BYTES
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig


def load(tmp_path: Path, content: str | bytes, *, ignore: bool = False) -> FaultToleranceConfig:
    path = tmp_path / "job.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return FaultToleranceConfig.from_yaml_file(path, ignore_not_recognized=ignore)


GOOD = {
    "top": "fault_tolerance:\n  lease: 7\n",
    "flow": "{fault_tolerance: {lease: 7}}",
    "deep": "a:\n  - b: 1\n  - c: {fault_tolerance: {lease: 7}}\n",
    "foreign brackets": "a: "
    + "[" * 50
    + "]" * 50
    + "\nb: '"
    + "[" * 999
    + "'\nfault_tolerance: {lease: 7}",
    "first": "a: {fault_tolerance: {lease: 7}}\nb: {fault_tolerance: {lease: 8}}\n",
    "foreign tag": "model: !hydra/x {a: 1}\nfault_tolerance: {lease: 7}\n",
    "foreign duplicate": "a: 1\na: 2\nfault_tolerance: {lease: 7}\n",
    "mark": b"\xef\xbb\xbffault_tolerance: {lease: 7}\n",
    "merge": "base: &b {lease: 7, prewarm: 'off'}\nfault_tolerance: {<<: *b, prewarm: auto}\n",
    "merge list": "x: &x {lease: 7}\ny: &y {lease: 9}\nfault_tolerance: {<<: [*x, *y]}\n",
    "text": "fault_tolerance: {lease: '7'}\n",
}


@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD.keys())
def test_the_section_is_found(tmp_path: Path, content: str | bytes) -> None:
    """The first mapping called fault_tolerance is read, at any depth, whatever is around it."""
    assert load(tmp_path, content) == FaultToleranceConfig(lease=7.0)


def test_bare_on_and_off_are_words(tmp_path: Path) -> None:
    """YAML's habit to read `off` as false does not break `prewarm: off`."""
    assert load(tmp_path, "fault_tolerance:\n  prewarm: off\n").prewarm == "off"
    assert load(tmp_path, "fault_tolerance:\n  prewarm: on\n").prewarm == "on"


def test_sections_may_be_a_mapping_or_text(tmp_path: Path) -> None:
    """Section timeouts are read from both forms."""
    as_mapping = "fault_tolerance:\n  rank_section_timeouts:\n    a: 1\n    b: null\n"
    as_text = "fault_tolerance:\n  rank_section_timeouts: 'a:1,b:none'\n"
    assert load(tmp_path, as_mapping) == load(tmp_path, as_text)


BAD = {
    "empty file": ("", "section fault_tolerance is missing"),
    "no section": ("a: 1\n", "section fault_tolerance is missing"),
    "misspelt section": (
        "fault_tolerence:\n  lease: 1\n",
        "fault_tolerance is missing; is it 'fault_tolerence' in line 1",
    ),
    "options without a section": ("lease: 1\n", "missing; write 'fault_tolerance:' and indent"),
    "a flag": ("fault_tolerance: {max_restarts: 1}\n", "a flag only: --max-restarts"),
    "no old names": ("fault_tolerance: {max_no_progress_restart: 1}\n", "mean max_no_progress_c"),
    "limit of a section": (
        "fault_tolerance:\n  rank_section_timeouts:\n    step: soon\n",
        "rank_section_timeouts: step: 'soon' is not a number of seconds",
    ),
    "empty section": ("fault_tolerance:\n", "section fault_tolerance is empty"),
    "empty mapping": ("fault_tolerance: {}\n", "section fault_tolerance is empty"),
    "list": ("fault_tolerance:\n  - a\n", "line 2: fault_tolerance is no mapping"),
    "text": ("fault_tolerance: yes please\n", "line 1: fault_tolerance is no mapping"),
    "twice": ("fault_tolerance: {lease: 1}\nfault_tolerance: {lease: 2}\n", "line 2: .* twice"),
    "duplicate": ("fault_tolerance:\n  lease: 1\n  lease: 2\n", "line 3: key 'lease' .* twice"),
    "inner duplicate": (
        "fault_tolerance:\n  rank_section_timeouts:\n    a: 1\n    a: 2\n",
        "line 4: key 'a' .* twice",
    ),
    "both names": (
        "fault_tolerance: {max_no_progress_restarts: 1, max_no_progress_cycles: 2}\n",
        "max_no_progress_cycles: is the same as 'max_no_progress_restarts'",
    ),
    "tab": ("fault_tolerance:\n\tlease: 1\n", "line 2: is not YAML: .*indent with spaces"),
    "broken": ("fault_tolerance: {lease: 1\n", "is not YAML"),
    "control": (b"fault_tolerance: {lease: \x01}\n", "is not YAML"),
    "two documents": ("fault_tolerance: {lease: 1}\n---\na: 1\n", "is not YAML"),
    "latin": (b"fault_tolerance: {lease: 1} # \xe4\n", "is no UTF-8 text"),
    "typo": (
        "fault_tolerance:\n  rank_heartbeat_timeuot: 1\n",
        "line 2: unknown key 'rank_heartbeat_timeuot'; did you mean rank_heartbeat_timeout",
    ),
    "value": ("fault_tolerance:\n  lease: soon\n", "line 2: lease: 'soon' is not a number"),
    "signal": ("fault_tolerance: {rank_termination_signal: SIGX}\n", "SIGX.* is not the name"),
    "null": ("fault_tolerance: {lease: null}\n", "lease: None is not"),
    "nested": ("fault_tolerance: {lease: [[1]]}\n", "lease is nested too deeply"),
    "mapping": ("fault_tolerance: {lease: {a: 1}}\n", "lease: a mapping is not"),
    "key": ("fault_tolerance: {[a]: 1}\n", "a key is no plain word"),
    "merge scalar": ("fault_tolerance: {<<: 1, lease: 1}\n", "<< takes a mapping"),
    "tag": ("fault_tolerance: {lease: !!python/object:os.system 1}\n", "is not YAML"),
    "date": ("fault_tolerance: {lease: 2024-02-31}\n", "lease is no value that can be read"),
    "brackets": ("[" * 100_000, "nested too deeply"),
    "a hundred brackets": ("[" * 100, "nested too deeply"),
    "lone host": ("fault_tolerance: {attrsvc_host: h}\n", "needs both a host and a port"),
    "binary": (b"\x80\x04\x95", "is no UTF-8 text"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_explained(tmp_path: Path, content: str | bytes, message: str) -> None:
    """A bad file raises one ValueError of one line that names the file and the place."""
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path, content)
    text = str(caught.value)
    assert str(tmp_path / "job.yaml") in text
    assert "\n" not in text
    assert len(text) < 1000


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    """Somebody's checkpoint named by mistake is refused by its size."""
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        load(tmp_path, b"#" * (SIZE_LIMIT_BYTES + 1))


@pytest.mark.parametrize("step", ["[{0}, {0}]", "{{<<: [{0}, {0}], k{1}: 1}}"])
def test_aliases_do_not_explode(tmp_path: Path, step: str) -> None:
    """A small file whose aliases stand for 2**60 values is refused at once."""
    lines = ["a0: &a0 {lease: 7}"]
    lines += [f"a{n}: &a{n} " + step.format(f"*a{n - 1}", n) for n in range(1, 60)]
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"job\.yaml"):
        load(tmp_path, "\n".join([*lines, "fault_tolerance: {<<: *a59, lease: *a58}\n"]))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("step", ["[{0}, {0}]", "{{a: {0}, b: {0}}}"])
def test_foreign_aliases_are_searched_once(tmp_path: Path, step: str) -> None:
    """A section behind 2**60 paths through somebody else's aliases is found at once."""
    lines = ["- a0: &a0 {lease: 7}"]
    lines += [f"- a{n}: &a{n} " + step.format(f"*a{n - 1}") for n in range(1, 60)]
    started = time.monotonic()
    config = load(tmp_path, "\n".join([*lines, "- fault_tolerance: {lease: 7}\n"]))
    assert config.lease == 7.0
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    """Whatever is in a file, the answer is a config or a ValueError."""
    chance = random.Random(7)
    contents = [*GOOD.values(), *(item for item, _ in BAD.values())]
    seeds = [item if isinstance(item, bytes) else item.encode() for item in contents]
    for _ in range(400):
        content = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 4)):
            place = chance.randint(0, len(content))
            content[place : place + chance.randint(0, 3)] = chance.choice(
                [
                    b"",
                    b"*a",
                    b"&a ",
                    b"<<: ",
                    b"[",
                    b"{",
                    b": ",
                    b"!!",
                    b"\x00",
                    b"\xff",
                    b"9" * 5000,
                ]
            )
        with contextlib.suppress(ValueError):
            load(tmp_path, bytes(content))


def test_a_mapping_that_merges_itself_comes_to_an_end(tmp_path: Path) -> None:
    """An alias to its own mapping is no endless loop."""
    config = load(tmp_path, "fault_tolerance: &a\n  lease: 7\n  <<: *a\n")
    assert config.lease == 7.0


def test_missing_file_and_directory(tmp_path: Path) -> None:
    """A missing file is FileNotFoundError; a directory is explained."""
    with pytest.raises(FileNotFoundError):
        FaultToleranceConfig.from_yaml_file(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        FaultToleranceConfig.from_yaml_file(tmp_path)


def test_a_pipe_that_has_a_name_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody may write into it, ever; so it is not waited for."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"^/.*/pipe: is not a regular file$"):
        FaultToleranceConfig.from_yaml_file(path)


def test_an_open_pipe_is_read() -> None:
    """What a shell gives as `<(...)` is read to its end, also when the writer is slow."""
    reading, writing = os.pipe()

    def write() -> None:
        os.write(writing, b"fault_tolerance:\n")
        threading.Event().wait(0.3)
        os.write(writing, b"  lease: 7\n")
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        config = FaultToleranceConfig.from_yaml_file(f"/dev/fd/{reading}")
        assert config.lease == 7.0
        with pytest.raises(ValueError, match="is missing"):
            FaultToleranceConfig.from_yaml_file(f"/dev/fd/{reading}")  # it is empty now
    finally:
        writer.join()
        os.close(reading)


def test_an_open_pipe_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that neither writes nor leaves is an error after a while."""
    monkeypatch.setattr(yaml_file, "PIPE_LIMIT_S", 0.2)
    reading, writing = os.pipe()
    try:
        with pytest.raises(ValueError, match=r"^/dev/fd/\d+: is a pipe without an end: waited"):
            FaultToleranceConfig.from_yaml_file(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        os.close(writing)


def test_the_null_device_is_an_empty_file() -> None:
    """It has no section, and other devices are refused."""
    with pytest.raises(ValueError, match="section fault_tolerance is missing"):
        FaultToleranceConfig.from_yaml_file("/dev/null")
    with pytest.raises(ValueError, match="is not a regular file"):
        FaultToleranceConfig.from_yaml_file("/dev/zero")


def test_half_an_address_is_one_mistake(tmp_path: Path) -> None:
    """An old host without its port is reported once."""
    with pytest.raises(ValueError, match="needs both") as caught:
        load(tmp_path, "fault_tolerance: {attrsvc_host: h}\n")
    assert str(caught.value).count("needs both") == 1


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    """Unknown keys and wrong values stand in one error."""
    with pytest.raises(ValueError, match=r"lease.*log_level.*frobnicate"):
        load(tmp_path, "fault_tolerance: {lease: 0, frobnicate: 1, log_level: 1}\n")


def test_old_keys_are_taken_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys of earlier releases work and leave one warning each."""
    content = """
fault_tolerance:
  attrsvc_host: h
  attrsvc_port: 80
  use_infra_group_rank: true
  progress_update_interval: 30.0
  restart_policy: any-failed
  max_no_progress_restarts: 9
"""
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        config = load(tmp_path, content)
    assert config.attribution_endpoint == "http://h:80"
    assert config.max_no_progress_cycles == 9
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == len(content.strip().splitlines()) - 1
    for line in content.strip().splitlines()[1:]:
        key = line.partition(":")[0].strip()
        assert sum(f": {key}: " in text for text in texts) == 1


def test_unknown_keys_may_be_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The permissive method logs all unknown keys in one warning."""
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        load(tmp_path, "fault_tolerance: {lease: 7, aa: 1, bb: 2}\n", ignore=True)
    assert len(caplog.records) == 1
