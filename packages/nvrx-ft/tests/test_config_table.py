# SPDX-License-Identifier: Apache-2.0
"""One table, no drift: dataclass, YAML keys, flags and docs say the same."""

import ast
import contextlib
import dataclasses
import inspect
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._config import settings, values
from nvidia_resiliency_ext.fault_tolerance._config.flags import FLAGS, OLD_SPELLINGS
from nvidia_resiliency_ext.fault_tolerance._config.table import OPTIONS, Option
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig

# A value of each kind whose default is None.
SAMPLES = {
    "SECONDS": "1",
    "N": "1",
    "PATH": "/{nic}",
    "PATH,...": "/a,/b",
    "TEXT": "text",
    "COMMAND": "command",
    "SIGNAL": "USR1",
    "WHEN": "slurm",
    "{log,no-restart}": "log",
}
OPTION_FLAGS = {flag.attribute: flag for flag in FLAGS}


def annotation_of(option: Option) -> str:
    """Return the type of what an option's kind makes of values, as the dataclass writes it."""
    takes_none = False
    with contextlib.suppress(ValueError, TypeError):
        takes_none = values.read(option.kind, None, option.field) is None
    value = option.default
    if value is None:
        value = values.read(option.kind, SAMPLES[option.kind.metavar], option.field)
    name = {"dict": "Mapping[str, float | None]", "Signals": "signal.Signals"}.get(
        type(value).__name__, type(value).__name__
    )
    return f"{name} | None" if takes_none else name


def test_the_dataclass_has_the_fields_of_the_table() -> None:
    """Names, order, types and defaults of the fields are those of the table."""
    fields = dataclasses.fields(FaultToleranceConfig)
    assert [field.name for field in fields] == [option.field for option in OPTIONS]
    default = FaultToleranceConfig()
    for field, option in zip(fields, OPTIONS, strict=True):
        assert str(field.type) == annotation_of(option), option.field
        value = getattr(default, option.field)
        assert value == option.default, option.field
        assert type(value) is type(option.default), option.field


def test_the_dataclass_writes_its_fields_as_the_table_does() -> None:
    """The written default of each field, before any check ran, is the table's."""
    tree = ast.parse(inspect.getsource(settings))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    written = [node.target.id for node in body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
    assert written == [option.field for option in OPTIONS]


def test_defaults_are_shown_as_one_writes_them(tmp_path: Path) -> None:
    """A file with every default as help and reference show it gives the default configuration."""
    shown = {option.field: option.default_text for option in OPTIONS}
    path = tmp_path / "ft.yaml"
    lines = [f"  {field}: {text}\n" for field, text in shown.items()]
    path.write_text("fault_tolerance:\n" + "".join(lines))
    assert FaultToleranceConfig.from_yaml_file(str(path)) == FaultToleranceConfig()
    assert (shown["log_level"], shown["rank_termination_signal"]) == ("INFO", "SIGKILL")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_every_option_has_its_flag(option: Option) -> None:
    """An option has one flag with the same kind, and a sentence of help."""
    flag = OPTION_FLAGS[f"ft_{option.field}"]
    assert flag.kind is option.kind
    assert flag.default is None
    assert flag.group == option.group
    assert option.help.endswith(".")


def test_names_of_flags_are_unique() -> None:
    """Names and attributes of flags are unique, and none is an old spelling."""
    names = [flag.name for flag in FLAGS]
    assert len(set(names)) == len(names)
    assert len(OPTION_FLAGS) == len(FLAGS)
    assert not set(names) & set(OLD_SPELLINGS)
