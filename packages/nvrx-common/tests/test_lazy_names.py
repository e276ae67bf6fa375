# SPDX-License-Identifier: Apache-2.0
"""Public names that a module loads from others when they are first used."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose names `one` and `two` stand in its module `home`."""
    folder = tmp_path / "lazy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names\n"
        "__all__ = ['home', 'one', 'two']\n"
        "__getattr__, __dir__ = lazy_names(globals(), {'home': ('one', 'two')})\n"
    )
    (folder / "home.py").write_text("one = object()\ntwo = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy_package", "lazy_package.home"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return "lazy_package"


def test_a_name_is_loaded_once_when_it_is_used(package: str) -> None:
    """The home is imported at the first use, and the name stays."""
    module = __import__(package)
    assert f"{package}.home" not in sys.modules
    first = module.one
    assert first is sys.modules[f"{package}.home"].one
    assert module.__dict__["one"] is first
    assert module.home is sys.modules[f"{package}.home"]


def test_all_names_are_listed_before_they_are_loaded(package: str) -> None:
    """`dir` has public names that nobody used yet, and not what loads them."""
    listed = dir(__import__(package))
    assert {"one", "two"} <= set(listed)
    assert "lazy_names" not in listed
    assert f"{package}.home" not in sys.modules


def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    """The error says module and name."""
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'three'"):
        _ = __import__(package).three
