# SPDX-License-Identifier: Apache-2.0
"""`FaultToleranceConfig` as a value: what it accepts, refuses, and turns into and back."""

import argparse
import json
import logging
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from nvidia_resiliency_ext.fault_tolerance._core.errors import FaultToleranceConfigError
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

UNUSUAL = FaultToleranceConfig(
    rank_section_timeouts={"setup": 600, "step": None},
    rank_termination_signal=signal.SIGINT,
    log_level=10,
    storage_healthcheck_path="/a,/b",
    segment=4,
    preempt_signal=signal.SIGUSR1,
    prewarm="on",
    prewarm_import="torch,apex.ops",
    enable_nic_healthcheck=False,
)


def test_a_config_survives_every_way_of_travelling(tmp_path: Path) -> None:
    """Pickle, dict, JSON and YAML each give back an equal config."""
    path = tmp_path / "job.yaml"
    UNUSUAL.to_yaml_file(path)
    assert FaultToleranceConfig.from_yaml_file(path, ignore_not_recognized=False) == UNUSUAL
    assert pickle.loads(pickle.dumps(UNUSUAL)) == UNUSUAL
    as_text = json.dumps(UNUSUAL.to_dict())
    assert FaultToleranceConfig.from_dict(json.loads(as_text)) == UNUSUAL
    assert FaultToleranceConfig() != UNUSUAL


def test_pickles_name_the_public_module() -> None:
    """A pickle names the path that users import from, so that private modules may move."""
    assert b"fault_tolerance.config" in pickle.dumps(FaultToleranceConfig())


def test_a_written_file_holds_plain_values(tmp_path: Path) -> None:
    """The file has one section, with the signal as its name and the level as a number."""
    import yaml

    path = tmp_path / "job.yaml"
    UNUSUAL.to_yaml_file(path)
    content = yaml.safe_load(path.read_text())
    assert list(content) == ["fault_tolerance"]
    assert content["fault_tolerance"]["rank_termination_signal"] == "SIGINT"
    assert content["fault_tolerance"]["log_level"] == 10


def test_fields_may_be_given_by_position() -> None:
    """The first fields are in the documented order."""
    config = FaultToleranceConfig(1.0, 2.0, 3.0, {"step": 4.0}, 5.0)
    assert config.initial_rank_heartbeat_timeout == 2.0
    assert config.rank_out_of_section_timeout == 5.0


def test_two_configs_share_nothing() -> None:
    """Sections of one config, or the mapping it was made from, do not leak into another."""
    given = {"step": 1.0}
    config = FaultToleranceConfig(rank_section_timeouts=given)
    given["other"] = 2.0
    assert config.rank_section_timeouts == {"step": 1.0}
    assert FaultToleranceConfig().rank_section_timeouts == {}


@pytest.mark.parametrize(
    ("field", "raw", "value"),
    [
        ("rank_termination_signal", "sigterm", signal.SIGTERM),
        ("rank_termination_signal", "Kill", signal.SIGKILL),
        ("rank_termination_signal", 15, signal.SIGTERM),
        ("rank_termination_signal", " 2", signal.SIGINT),
        ("log_level", "dbg", logging.DEBUG),
        ("log_level", "WARN", logging.WARNING),
        ("log_level", "critical", logging.CRITICAL),
        ("log_level", 35, 35),
        ("rank_heartbeat_timeout", "none", None),
        ("rank_heartbeat_timeout", "NULL", None),
        ("rank_heartbeat_timeout", "", None),
        ("rank_heartbeat_timeout", "1e3", 1000.0),
        ("rank_section_timeouts", "a:10, b:none", {"a": 10.0, "b": None}),
        ("rank_section_timeouts", "", {}),
        ("skip_section_response", "No", False),
        ("skip_section_response", 0, False),
        ("storage_healthcheck_path", ["/a", "/b"], "/a,/b"),
        ("link_state_path_template", "/sys/{dev_name}/x", "/sys/{dev_name}/x"),
        ("prewarm", False, "off"),
        ("prewarm", True, "on"),
        ("max_no_progress_cycles", -1, -1),
        ("prewarm_import", ["torch", "a.b"], "torch,a.b"),
    ],
)
def test_values_are_normalised(field: str, raw: Any, value: Any) -> None:
    """Each accepted way of writing a value gives the same value."""
    assert getattr(FaultToleranceConfig(**{field: raw}), field) == value


@pytest.mark.parametrize(
    ("field", "raw"),
    [
        ("workload_check_interval", 0),
        ("workload_check_interval", None),
        ("rank_heartbeat_timeout", -1),
        ("rank_heartbeat_timeout", "ten"),
        ("rank_heartbeat_timeout", float("nan")),
        ("rank_heartbeat_timeout", float("inf")),
        ("rank_heartbeat_timeout", True),
        ("rank_heartbeat_timeout", 10**400),
        ("rank_section_timeouts", {"step": -1}),
        ("rank_section_timeouts", {1: 1}),
        ("rank_section_timeouts", {"a b:c": 1}),
        ("rank_section_timeouts", "step"),
        ("rank_section_timeouts", "step:1,step:2"),
        ("rank_section_timeouts", ["step"]),
        ("rank_termination_signal", "SIGNOTHING"),
        ("rank_termination_signal", 999),
        ("preempt_signal", "SIGKILL"),
        ("preempt_signal", "SIGCHLD"),
        ("log_level", 9),
        ("log_level", "LOUD"),
        ("skip_section_response", "maybe"),
        ("skip_section_response", [1]),
        ("max_no_progress_cycles", 1.5),
        ("max_no_progress_cycles", 2**63),
        ("num_warmup_iterations", str(2**63)),
        ("num_warmup_iterations", -1),
        ("segment", 0),
        ("storage_healthcheck_path", "relative"),
        ("link_state_path_template", "/sys/fixed"),
        ("monitor_mode", "both"),
        ("prewarm", "On"),
        ("prewarm_import", "os; rm"),
        ("checkpoint_iteration_file", "a\0b"),
    ],
)
def test_a_wrong_value_is_named(field: str, raw: Any) -> None:
    """A wrong value raises ValueError that names the field and says what is allowed."""
    with pytest.raises(ValueError, match=rf"^{field}: .* is not ") as caught:
        FaultToleranceConfig(**{field: raw})
    assert len(str(caught.value)) < 400


def test_all_mistakes_are_reported_at_once() -> None:
    """One error lists every wrong field, and is a ConfigError."""
    with pytest.raises(ConfigError) as caught:
        FaultToleranceConfig(lease=0, prewarm="x", log_level=1)
    assert isinstance(caught.value, FaultToleranceConfigError)
    assert [text.partition(":")[0] for text in caught.value.problems] == [
        "log_level",
        "prewarm",
        "lease",
    ]


def test_an_error_survives_pickling() -> None:
    """The error of a config may cross a process boundary."""
    error = FaultToleranceConfigError(["a: 1 is wrong", "b: 2 is wrong"])
    assert str(pickle.loads(pickle.dumps(error))) == "a: 1 is wrong; b: 2 is wrong"


def test_from_kwargs_names_the_nearest_option() -> None:
    """An unknown name is refused with the nearest one, unless it may be ignored."""
    with pytest.raises(ValueError, match="did you mean rank_heartbeat_timeout"):
        FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, rank_hartbeat_timeout=1)


def test_from_kwargs_logs_what_it_ignores(caplog: pytest.LogCaptureFixture) -> None:
    """An ignored name leaves one warning, and older names of a field are taken."""
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        config = FaultToleranceConfig.from_kwargs(nonsense=1, max_no_progress_restarts=7)
    assert config == FaultToleranceConfig(max_no_progress_cycles=7)
    assert sum("nonsense" in record.getMessage() for record in caplog.records) == 1


def test_from_kwargs_takes_keys_of_earlier_releases(caplog: pytest.LogCaptureFixture) -> None:
    """They mean what they mean in a file, leave one warning each, and lose against present ones."""
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        config = FaultToleranceConfig.from_kwargs(
            ignore_not_recognized=False,
            attrsvc_host="h",
            attrsvc_port=80,
            use_infra_group_rank=True,
            restart_policy="any-failed",
        )
    assert config == FaultToleranceConfig(attribution_endpoint="http://h:80")
    assert len(caplog.records) == 4
    present = {"attribution_endpoint": "http://p:1"}
    config = FaultToleranceConfig.from_kwargs(attrsvc_host="h", attrsvc_port=80, **present)
    assert config.attribution_endpoint == "http://p:1"
    with pytest.raises(ValueError, match=r"attrsvc_port.*attrsvc_host: needs both"):
        FaultToleranceConfig.from_kwargs(attrsvc_host="h", attrsvc_port="x")


def test_from_dict_refuses_unknown_keys() -> None:
    """A message with a field of another version is not read by halves."""
    with pytest.raises(ValueError, match="future"):
        FaultToleranceConfig.from_dict({"future": 1})


def test_from_args_lets_flags_win_over_the_file(tmp_path: Path) -> None:
    """Defaults, then the file, then every attribute that is not None."""
    path = tmp_path / "job.yaml"
    path.write_text("fault_tolerance: {rank_heartbeat_timeout: 10, safety_factor: 3}\n")
    args = argparse.Namespace(
        ft_cfg_path=str(path), ft_rank_heartbeat_timeout="none", ft_safety_factor=None, ft_lease="7"
    )
    config = FaultToleranceConfig.from_args(args)
    assert config == FaultToleranceConfig(safety_factor=3.0, lease=7.0)


def test_from_args_reports_a_missing_file() -> None:
    """A file that does not exist raises FileNotFoundError."""
    with pytest.raises(FileNotFoundError):
        FaultToleranceConfig.from_args(argparse.Namespace(ft_cfg_path="/no/such/file"))


def test_progress_tracking_can_be_switched_off() -> None:
    """Zero and less mean that a job is never given up for lack of progress."""
    assert FaultToleranceConfig().is_progress_tracking_enabled
    assert not FaultToleranceConfig(max_no_progress_cycles=0).is_progress_tracking_enabled
    assert not FaultToleranceConfig(max_no_progress_cycles=-1).is_progress_tracking_enabled
