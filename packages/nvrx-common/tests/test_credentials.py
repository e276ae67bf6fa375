# SPDX-License-Identifier: Apache-2.0
"""Tokens and certificates in files: who may read them, what counts when they are replaced."""

import logging
import os
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils.credentials import (
    PemFile,
    TokenFile,
    is_loopback,
    read_token,
)
from nvidia_resiliency_ext.shared_utils.errors import ConfigError


def put(path: Path, text: str) -> Path:
    """Replace a file as tools that rotate secrets do: by another one, in one step."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)
    return path


def test_a_token_that_is_replaced_counts_at_once(tmp_path: Path) -> None:
    """Server and client go on with the new token; the old one is refused."""
    path = put(tmp_path / "token", "old\n")
    server, client = TokenFile(str(path)), TokenFile(str(path))
    old = client.header()
    assert server.admits(old)
    put(path, "new\n")
    assert client.header() == "Bearer new"
    assert server.admits(client.header())
    assert server.admits(b"Bearer new")
    assert not server.admits(old)


def test_a_file_in_the_making_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the file is absent, empty or open to others the last token counts, said once each."""
    monkeypatch.setattr(logging.getLogger("nvrx"), "propagate", True)
    path = put(tmp_path / "token", "old")
    token = TokenFile(str(path))
    path.unlink()
    assert [token.token(), token.token()] == ["old", "old"]
    put(path, "")
    assert [token.token(), token.token()] == ["old", "old"]
    path.write_text("new")
    path.chmod(0o644)
    assert [token.token(), token.token()] == ["old", "old"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    path.chmod(0o600)
    assert token.token() == "new"


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("x", 0o640, "others may read it"),
        ("", 0o600, "one line of printable ASCII"),
        ("a\nb", 0o600, "one line of printable ASCII"),
        ("\xe9", 0o600, "one line of printable ASCII"),
        ("x" * 5000, 0o600, "one line of printable ASCII"),
        (None, 0, "No such file"),
    ],
)
def test_what_is_no_token(tmp_path: Path, content: str | None, mode: int, reason: str) -> None:
    """The error names the file as the caller calls it, and says what is wrong."""
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=f"--token-file '{path}'.*{reason}"):
        read_token(str(path), "--token-file")
    with pytest.raises(ConfigError, match=reason):
        TokenFile(str(path))


def test_nobody_is_let_in_without_the_header(tmp_path: Path) -> None:
    """No header, another scheme, a bare token and bytes that are no text are refused."""
    server = TokenFile(str(put(tmp_path / "token", "t")))
    for header in (None, "", "t", "Basic t", "Bearer ", "Bearer tt", "Bearer \xe9", b"\xff\xfe"):
        assert not server.admits(header)
    assert server.admits("Bearer t")


def test_a_certificate_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    """The new content counts; what is no PEM is an error at first, and passed over later."""
    path = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=r"ca_file '.*': No such file"):
        PemFile(str(path), "ca_file")
    path.write_text("rubbish")
    with pytest.raises(ConfigError, match="nothing in PEM form"):
        PemFile(str(path))
    path.write_text("-----BEGIN CERTIFICATE-----\n1\n")
    pem = PemFile(str(path))
    first = pem.read()
    put(path, "rubbish")
    assert pem.read() == first
    put(path, "-----BEGIN CERTIFICATE-----\n2\n")
    assert b"\n2\n" in pem.read()


def test_a_device_is_no_credential() -> None:
    """What would be read for ever is refused."""
    with pytest.raises(ConfigError, match="not a regular file"):
        PemFile(os.devnull)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True),
        ("localhost", True), ("unix:/run/s", True), ("0.0.0.0", False), ("::", False),
        ("10.0.0.1", False), ("localhost.example.org", False), ("", False),
    ],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    """Only what this machine alone can reach counts; names are not looked up."""
    assert is_loopback(host) is expected
