# SPDX-License-Identifier: Apache-2.0
"""The archive for a bug report: complete, bounded, without secrets, and safe to make and unpack."""

import json
import os
import random
import tarfile
import time
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils._report import bundle
from nvidia_resiliency_ext.shared_utils._report.bundle import Bundle
from nvidia_resiliency_ext.shared_utils.events import EventLog, Fault, JobEnd, JobStart
from nvidia_resiliency_ext.shared_utils.redaction import REDACTED, is_secret_name, redact
from nvidia_resiliency_ext.shared_utils.report import main

_SECRET = "s3cr3tValue"


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN={}",
        "export WANDB_API_KEY={}",
        "AWS_SECRET_ACCESS_KEY = {}",
        "password: {}",
        'db_password="{} with blanks"',
        "'slack_webhook': '{}'",
        "slackWebhook={}",
        '{{"auth_token":"{}","next":1}}',
        '{{"detail":"run with API_KEY=\\"{}\\" failed"}}',
        "Authorization: Bearer {}",
        "Cookie: {}",
        "train.py --hf-token {} --lr 1",
        "train.py --api-key={}",
        '["--hf-token", "{}", "--lr"]',
        "https://user:{}@host/path",
        "postgres://u:{}@db:5432/x",
        "GET /x?a=1&sig={}&b=2",
        "SSH_KEY={}",
        "storage.account_key: {}",
        "-----BEGIN RSA PRIVATE KEY-----\n{}\nmore\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\n{} cut off",
        "passphrase={}",
        "password: |\n  first\n  {}\n\n  last",
        "db:\n  api_key: >- # folded\n    {}\n  port: 5",
        "credentials:\n  user: bob\n  more:\n    - {}",
        "tokens:\n- {}\n- second",
        "'password': !!str &mark |-\r\n  {}\r",
        "- token: |\n    {}\n- next: 1",
        "password: first\n  {}",
        'password: "first\n  {}"',
        'password = """\n{}\n"""',
        'tokens = [\n  "{}",\n  "second",\n]',
        "[db]\npassword = first\n    {}",
        'INFO config={{"credentials": {{"user": "u", "more": ["{}"]}}, "next": 1}} done',
        'args "{{\\"secret\\": {{\\"a\\": \\"{}\\"}}}}"',
        "Namespace(auth=('bob', '{}'), lr=1)",
        'password: "quo\\"te {}"',
        "auth: {{user: bob, note: it's, more: {}}}",
        "curl -u bob:{} http://x",
        "machine h login bob password {}",
        "https://hooks.slack.com/services/T0AAAAAAA/B0BBBBBBB/{}",
        "DB_PASS={}",
        "encryption_key_hex: {}",
        "API_KEY_1={}",
        "db_pass: {}",
        "postgres://u:p@{}@db:5432/x",
        "postgres://u:p/{}@db:5432/x",
        "curl -ubob:{} http://x",
        "machine h\nlogin bob\npassword {}",
        "{{'password': b'{}'}}",
        "password=SecretStr('{}')",
        "password: 'it''s {}'",
        "'token' => '{}'",
        "metadata=(('authorization', 'Bearer {}'),)",
        "headers=[(b'x-api-key', b'{}')]",
        "headers=[('authorization','Bearer {}')]",
        "env:\n- name: HF_TOKEN\n  value: {}\n- name: LR\n  value: 1",
        'env: [{{name: HF_TOKEN, value: "{}"}}]',
        '{{"name": "HF_TOKEN", "value": "{}"}}',
        "got Bearer {}0123456789",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n{}\n-----END PGP PRIVATE KEY BLOCK-----",
        "of a log\n{0}{0}{0}{0}{0}{0}\n{0}=\n-----END RSA PRIVATE KEY-----",
        "env:\n- name: DB_PASSWD\n  value: {}\n- name: LR\n  value: 1",
        "items=[('db_passwd', '{}')]",
        "mysql_pass = {}",
        "token: &anchor {}",
        "log(password=f'{}')",
        "passwords=['first', '{}', 'last'] lr=1",
    ],
)
def test_secrets_go(text: str) -> None:
    """A value whose name or form says that it is secret is not in the result."""
    kept, count = redact(f"before\n{text.format(_SECRET)}\nafter")
    assert _SECRET not in kept
    assert "blanks" not in kept
    assert REDACTED in kept
    assert count == 1
    assert kept.startswith("before\n")
    assert kept.endswith("\nafter") or "cut off" in text
    assert "last" not in kept
    assert redact(kept) == (kept, 0)


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a1B2" * 8,
        "nvapi-" + "a1B2" * 8,
        "sk-proj-" + "a1B2" * 8,
        "ghp_" + "a1B2" * 9,
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcDEF123",
    ],
)
def test_known_forms_go(secret: str) -> None:
    """A token of a known form is found anywhere."""
    kept, count = redact(f"the value {secret} was refused")
    assert kept == f"the value {REDACTED} was refused"
    assert count == 1


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=4096, tokens per second: 1200",
        "num_tokens: 12.5",
        "author=me monkey=banana keyboard: us",
        "rank 3 on node-7 passed: 5 of 5",
        "token=None, password: null",
        "2026-01-02 03:04:05,678 [INFO] [n1] [workload:0(0) infra:?(?)] a.py:1 hello",
        '{"t":1.5,"m":2.5,"kind":"fault","cause":"killed","what":"signal 9"}',
        "commit 0123456789abcdef0123456789abcdef01234567",
        "forward_pass: 12 ms, first pass: 3",
        "docker run -u 1000:1000 image",
        "max_tokens: 4096\nlayers:\n  - 1\n  - 2",
        "note: |\n  two\n  lines",
        "- name: LR\n  value: 1\n- name: tokenizer\n  value: gpt2",
        "http://host:8080/a@b and user@host",
        "choices=('train', 'test') path=SomePath('/a')",
    ],
)
def test_other_text_stays(text: str) -> None:
    """What is no secret is not touched."""
    assert redact(text) == (text, 0)


def test_json_stays_json() -> None:
    """A line of JSON from which a secret was taken is still JSON."""
    line = json.dumps({"what": 'TOKEN="a b" key: x, --api-key "y"', "password": 'q"uote', "n": 1})
    found = json.loads(redact(line)[0])
    assert found["n"] == 1
    assert found["password"] == REDACTED
    assert json.loads(redact('{"key": "MYSQL_PASS", "value": "x1"}')[0])["value"] == REDACTED


def test_all_within_a_secret_goes() -> None:
    """In JSON, lists and objects under a secret name hold nothing that stays; counts do."""
    line = json.dumps({"credentials": {"user": "u", "more": ["x", 7]}, "max_tokens": [1, 2]})
    assert json.loads(redact(line)[0]) == {
        "credentials": {"user": REDACTED, "more": [REDACTED, REDACTED]},
        "max_tokens": [1, 2],
    }


def test_hostile_text_is_quick() -> None:
    """No text makes the search slow."""
    start = time.monotonic()
    for piece in (
        "a_",
        "token",
        "key=",
        "a",
        "-----BEGIN PRIVATE KEY-----",
        'token="',
        "://",
        "eyJ.",
        "key:\n ",
        "key: [",
        "key: '{(",
        '\n key: "a\n',
        "-u a:",
        "login ",
        "-----END PRIVATE KEY-----\n",
        "a://b:",
        "name: ",
    ):
        redact(piece * (200_000 // len(piece)))
    randomly = random.Random(2)
    redact("".join(randomly.choices("tokenpass=_-:'\"\\ \n[{|>&!", k=200_000)))
    assert time.monotonic() - start < 30


def test_names() -> None:
    """Names of variables are evaluated by their parts."""
    assert all(map(is_secret_name, ("HF_TOKEN", "MY_KEY", "X_PASSWORD_FILE", "apikey", "auth")))
    assert not any(
        map(is_secret_name, ("PATH", "MONKEY", "AUTHOR", "NCCL_DEBUG", "NVRX_EVENT_DIR"))
    )


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a directory as `--log-dir` leaves it, with secrets in every place."""
    root = tmp_path / "job"
    log = EventLog.create(root, src="launcher", job_id="7", launch_id="a", host="n1")
    log.record(JobStart(nnodes=1, nproc=1), cycle=None)
    log.record(Fault(cause="exited", what=f"HF_TOKEN={_SECRET}"), cycle=0, rank=0)
    log.record(JobEnd(result="failed", exit_code=1), cycle=None)
    log.close()
    (root / "ft.yaml").write_text(f"fault_tolerance:\n  api_key: {_SECRET}\n")
    (root / "0" / "1").mkdir(parents=True)
    (root / "0" / "1" / "stderr.log").write_text(f"--password {_SECRET}\n" * 50_000 + "the end\n")
    (root / "model.pt").write_bytes(b"\0" * 100)
    (root / "core.log").write_bytes(b"\0" * 100)
    (root / "passwd.log").symlink_to("/etc/passwd")
    os.mkfifo(root / "pipe.log")
    return root


def _members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        assert all(member.isreg() and member.mode == 0o600 for member in members)
        assert not any(".." in member.name or member.name.startswith("/") for member in members)
        assert len({member.name.split("/")[0] for member in members}) == 1
        texts = {}
        for member in members:
            file = tar.extractfile(member)
            assert file is not None
            texts[member.name.partition("/")[2]] = file.read().decode()
    return texts


def test_bundle(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command gathers record, report, versions, settings and logs' ends, without secrets."""
    monkeypatch.setenv("NVRX_SECRET_TOKEN", _SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UNRELATED", "private matter")
    target = tmp_path / "b.tar.gz"
    assert main(["bundle", str(job), "-o", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    assert target.stat().st_mode & 0o777 == 0o600
    texts = _members(target)
    assert set(texts) == {
        "README.txt", "machine.txt", "environment.txt", "report-0.txt", "report-0.json",
        "files-0/events-n1-a.jsonl", "files-0/ft.yaml", "files-0/0/1/stderr.log",
    }  # fmt: skip
    assert not [name for name, text in texts.items() if _SECRET in text]
    assert "exited" in texts["files-0/events-n1-a.jsonl"]
    assert all(json.loads(line) for line in texts["files-0/events-n1-a.jsonl"].splitlines())
    assert "job 7" in texts["report-0.txt"]
    assert "nvrx-common" in texts["machine.txt"]
    assert "NCCL_DEBUG=INFO" in texts["environment.txt"]
    assert "private matter" not in texts["environment.txt"]
    end = texts["files-0/0/1/stderr.log"]
    assert end.endswith("the end\n")
    assert len(end) < 300_000
    for name in ("core.log", "passwd.log", "pipe.log"):
        assert f"files-0/{name}: left out" in texts["README.txt"]


def test_bundle_is_bounded(tmp_path: Path) -> None:
    """What does not fit any more is left out and named; the archive stays small."""
    job = tmp_path / "job"
    job.mkdir()
    for number in range(30):
        (job / f"{number:02d}.log").write_bytes(os.urandom(150_000).hex().encode())
    target = tmp_path / "b.tar.gz"
    assert main(["bundle", str(job), "-o", str(target), "--max-size", "1"]) == 0
    texts = _members(target)
    assert sum(map(len, texts.values())) < 2 << 20
    assert texts["README.txt"].count("has reached its size") >= 20


def test_a_walk_over_very_many_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory with millions of files is not read to its end, and the first page says so."""
    monkeypatch.setattr(bundle, "_MOST_SEEN", 5)
    for number in range(4):
        folder = tmp_path / "job" / f"{number}"
        folder.mkdir(parents=True)
        for each in range(3):
            (folder / f"{each}.log").write_text("x")
    target = tmp_path / "b.tar.gz"
    assert main(["bundle", str(tmp_path / "job"), "-o", str(target)]) == 0
    texts = _members(target)
    assert sum(name.endswith(".log") for name in texts) == 6
    assert "more than 5 files: not all were looked at" in texts["README.txt"]


def test_bundle_refuses(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is overwritten, no link is followed, and a wrong path is one line."""
    target = tmp_path / "b.tar.gz"
    target.write_text("precious")
    (tmp_path / "link.tar.gz").symlink_to(tmp_path / "elsewhere")
    for arguments in (
        [str(job), "-o", str(target)],
        [str(job), "-o", str(tmp_path / "link.tar.gz")],
        [str(job), "-o", str(tmp_path / "none" / "b.tar.gz")],
        [str(tmp_path / "none")],
        ["--config", str(tmp_path / "none")],
    ):
        assert main(["bundle", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert target.read_text() == "precious"
    assert not (tmp_path / "elsewhere").exists()


def test_names_in_the_archive(tmp_path: Path) -> None:
    """Whatever files are called, their names in the archive lead nowhere else and stay apart."""
    made = Bundle("../top", 1000)
    for name in ("../../etc/x", "/abs", "a\nb", "a b", "-rf", ".hidden", "x" * 300):
        made.add(name, "text")
    made.add("big", "x" * 2000)
    made.write(str(tmp_path / "a.tar.gz"))
    texts = _members(tmp_path / "a.tar.gz")
    assert texts.pop("README.txt").count("left out") == 1
    assert set(texts) == {"_/_/etc/x", "abs", "a_b", "a_b-2", "rf", "hidden", "x" * 80}
