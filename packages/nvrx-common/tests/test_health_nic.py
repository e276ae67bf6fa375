# SPDX-License-Identifier: Apache-2.0
"""Checks of network adapters over a tree of files in place of /sys."""

import logging
import random
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import health_check
from nvidia_resiliency_ext.shared_utils._health.nic import grown, is_active, match_nics, too_fast
from nvidia_resiliency_ext.shared_utils._health.pci import (
    TopologyError,
    natural_key,
    normal_bus_id,
    parse_topology,
    read_topology,
)
from nvidia_resiliency_ext.shared_utils.health_check import (
    NicHealthCheck,
    NicLinkStateHealthCheck,
    PciMixin,
)
from nvidia_resiliency_ext.testing_utils.fake_hardware import FakeNvml, fake_sysfs

GPUS = ("0000:00:01.0/0000:01:00.0/0000:10:00.0", "0009:00:01.0/0009:01:00.0/0009:11:00.0")
NICS = {
    "mlx5_0": "0009:00:01.0/0009:01:00.0/0009:12:00.0",
    "mlx5_1": "0000:00:01.0/0000:01:00.0/0000:12:00.0",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a node with two GPUs in two PCI domains, each with an adapter beside it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml({"count": 2, "bus.0": "00000000:10:00.0", "bus.1": "00000009:11:00.0"})
    health_check.set_nvml(fake)
    tree = fake_sysfs(tmp_path / "sys", NICS, GPUS)
    tree.nvml = fake
    yield tree
    health_check.set_nvml(None)


def nic_check(tree, rank=0, **options):
    return NicHealthCheck(rank, sysfs_root=tree.root, **options)


def test_nearest_adapter_in_any_domain(tree) -> None:
    """Each GPU gets the adapter behind its own switch, also outside PCI domain 0000."""
    assert nic_check(tree, 0).nic_name == "mlx5_1"
    assert nic_check(tree, 1).nic_name == "mlx5_0"


def test_rank_follows_cuda_visible_devices(tree, monkeypatch) -> None:
    """A rank means the device that CUDA_VISIBLE_DEVICES gives it, by index or UUID."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert nic_check(tree, 0).nic_name == "mlx5_0"


def test_pci_mixin(tree) -> None:
    """Ancestors come nearest first, and adapters with their addresses."""
    mixin = PciMixin()
    mixin._sysfs_root = tree.root
    assert mixin.get_pci_ancestor("0009:11:00.0") == ["0009:01:00.0", "0009:00:01.0"]
    assert mixin.get_pci_ancestor("00000009:11:00.0") == ["0009:01:00.0", "0009:00:01.0"]
    assert mixin.get_pci_ancestor("0000:99:00.0") == []
    assert mixin.get_pci_ancestor("../../etc") == []
    assert mixin.get_ib_pci_mapping() == {"mlx5_0": "0009:12:00.0", "mlx5_1": "0000:12:00.0"}


def test_link_down_is_unhealthy_until_acknowledged(tree) -> None:
    """A growing counter is unhealthy, stays so, and is healthy after `acknowledge`."""
    check = nic_check(tree)
    assert check()
    tree.set_counter("mlx5_1", "link_downed", 2)
    assert check.check().reason == "mlx5_1: port 1 went down 2 more times"
    assert not check()
    check.acknowledge()
    assert check()


def test_root_may_be_a_path_object(tree) -> None:
    """The folder in place of /sys may be text, a path object or the tree itself."""
    for root in (tree.root, Path(tree.root), tree):
        assert NicHealthCheck(0, sysfs_root=root).nic_name == "mlx5_1"
        assert NicLinkStateHealthCheck(sysfs_root=root).check().status == "healthy"


def test_all_ports_are_read(tree) -> None:
    """The second port of an adapter counts as the first."""
    tree.add_nic("mlx5_9", ["0000:00:02.0"], "0000:20:00.0", ports=(1, 2))
    check = nic_check(tree)
    check.nic_name = "mlx5_9"
    check.acknowledge()
    tree.set_counter("mlx5_9", "link_downed", 1, port=2)
    assert "port 2" in check.check().reason


def test_reset_counter_is_a_new_baseline(tree) -> None:
    """A counter that went down counts from there."""
    tree.set_counter("mlx5_1", "link_downed", 7)
    check = nic_check(tree)
    assert check._prev_link_downed == 7
    tree.set_counter("mlx5_1", "link_downed", 0)
    assert check()
    assert check._prev_link_downed == 0
    tree.set_counter("mlx5_1", "link_downed", 1)
    assert not check()


@pytest.mark.parametrize("name", ["{nic}", "{dev_name}"])
def test_templates(tree, tmp_path, name) -> None:
    """A template names the adapter either way and is read as it is."""
    counter = tmp_path / "mlx5_1" / "down"
    counter.parent.mkdir()
    counter.write_text("3\n")
    template = f"{tmp_path}/{name}/down"
    check = nic_check(tree, link_down_path_template=template)
    assert check._prev_link_downed == 3
    counter.write_text("4\n")
    assert not check()
    counter.write_text("rubbish\n")
    assert check()
    counter.unlink()
    assert check.check().status == "skipped"


def test_templates_within_a_name(tree, tmp_path) -> None:
    """Adapter and port may be parts of one name in a template."""
    folder = tmp_path / "flat"
    folder.mkdir()
    for port in (1, 2):
        (folder / f"mlx5_1_{port}_down").write_text("0\n")
        (folder / f"mlx5_1_{port}_state").write_text("4: ACTIVE\n")
    counters = nic_check(tree, link_down_path_template=f"{folder}/{{nic}}_{{port}}_down")
    states = NicLinkStateHealthCheck(f"{folder}/{{nic}}_{{port}}_state")
    assert counters()
    assert states.check().status == "healthy"
    (folder / "mlx5_1_2_down").write_text("1\n")
    assert counters.check().reason == "mlx5_1: port 2 went down 1 more times"
    (folder / "mlx5_1_2_state").write_text("1: DOWN\n")
    assert states.check().reason == "mlx5_1 port 2 was ACTIVE and is 1: DOWN"


def test_adapter_without_counter_or_gone(tree) -> None:
    """Without counter the check is skipped; an adapter that vanishes after that is unhealthy."""
    check = nic_check(tree)
    assert check()
    tree.remove_nic("mlx5_1")
    assert check.check().reason == "mlx5_1 has vanished"
    tree.remove_nic("mlx5_0")
    assert nic_check(tree).check().status == "skipped"


def test_unknown_rank_switches_the_check_off(tree, caplog) -> None:
    """A rank without GPU or adapter is said at ERROR, and the check is skipped."""
    with caplog.at_level(logging.ERROR, "nvrx"):
        check = nic_check(tree, 5)
    assert "local rank 5" in caplog.text
    assert check.check().status == "skipped"
    assert NicHealthCheck(sysfs_root=tree.root)()


def test_further_counters_by_rate(tree, monkeypatch) -> None:
    """A counter with a limit may not grow faster than that, also among hw_counters."""
    tree.set_counter("mlx5_1", "symbol_error", 0)
    tree.set_counter("mlx5_1", "rx_drops", 0, folder="hw_counters")
    check = nic_check(tree, counter_limits={"symbol_error": 10, "rx_drops": 0})
    assert check()
    tree.set_counter("mlx5_1", "symbol_error", 100_000)
    assert "1/symbol_error grew by" in check.check().reason
    assert check()
    tree.set_counter("mlx5_1", "rx_drops", 1, folder="hw_counters")
    assert "1/rx_drops" in check.check().reason


def test_gb200_table_only_when_nothing_was_derived(tree, tmp_path) -> None:
    """Where /sys says nothing a GB200 has its table, and another machine has nothing."""
    empty = fake_sysfs(tmp_path / "empty")
    assert NicHealthCheck(1, sysfs_root=empty.root).nic_name is None
    tree.nvml.answers["name"] = "NVIDIA GB200"
    assert NicHealthCheck(3, sysfs_root=empty.root).nic_name == "mlx5_4"
    assert nic_check(tree, 1).nic_name == "mlx5_0"


TOPOLOGY = """<system version="1"><cpu numaid="0">
<pci busid="0000:00:01.0"><pci busid="0000:10:00.0"/><pci busid="0009:12:00.0"/></pci>
<pci busid="00000000:00:02.0"><pci busid="0009:11:00.0"/><pci busid="0000:12:00.0"/></pci>
<pci busid="rubbish"><net name="x"/></pci></cpu></system>"""


def test_topology_file_wins_over_sys(tree, tmp_path) -> None:
    """A topology file says which devices sit together, whatever /sys says."""
    path = tmp_path / "topo.xml"
    path.write_text(TOPOLOGY)
    assert nic_check(tree, 0, pci_topo_file=str(path)).nic_name == "mlx5_0"
    assert nic_check(tree, 1, pci_topo_file=str(path)).nic_name == "mlx5_1"


BOMB = '<!DOCTYPE s [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;">]><s>&b;</s>'
EXTERNAL = '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><s>&x;</s>'


@pytest.mark.parametrize(
    "text",
    [
        BOMB, EXTERNAL, "<!DOCTYPE s SYSTEM 'http://127.0.0.1:1/x.dtd'><s/>", "", "no xml",
        "<a><b></a>", "<pci busid='0000:00:01.0'>" * 200, "<a>&undefined;</a>",
    ],
)  # fmt: skip
def test_bad_topology_is_refused(tree, tmp_path, caplog, text) -> None:
    """A file with entities, too deep or no XML at all is refused; the check is skipped."""
    with pytest.raises(TopologyError):
        parse_topology(text.encode())
    path = tmp_path / "topo.xml"
    path.write_text(text)
    with caplog.at_level(logging.ERROR, "nvrx"):
        assert nic_check(tree, pci_topo_file=str(path)).check().status == "skipped"
    assert str(path) in caplog.text


def test_topology_that_is_no_file(tmp_path) -> None:
    """A missing file, a folder and a path with NUL are refused."""
    for path in (tmp_path / "missing", tmp_path, "a\0b"):
        with pytest.raises(TopologyError):
            read_topology(str(path))


def test_topology_fuzz() -> None:
    """Whatever bytes a file has, it is read or refused, and nothing else."""
    rng = random.Random(7)
    pieces = [
        b"<pci busid='0000:00:01.0'>", b"</pci>", b"<!DOCTYPE x [", b"<!ENTITY a 'b'>", b"]>",
        b"<system>", b"</system>", b"\0", b"\xff\xfe", b"<pci busid='&lt;'/>", b"&a;",
        b"<?xml version='1.0'?>",
    ]  # fmt: skip
    read = 0
    for _ in range(3000):
        data = b"".join(rng.choices(pieces, k=rng.randrange(12)))
        try:
            parse_topology(data)
            read += 1
        except TopologyError:
            continue
    assert read > 0


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"), ("0009:01:00.1", "0009:01:00.1"),
        ("3b:00.0", "0000:3b:00.0"), ("00010001:3b:00.0", "10001:3b:00.0"), ("x", None),
        ("0000:3b:00", None), ("", None), ("0000:3b:00.9", None),
    ],
)  # fmt: skip
def test_normal_bus_id(text, normal) -> None:
    """Addresses of the driver and of files are written as /sys has them."""
    assert normal_bus_id(text) == normal


def test_natural_order() -> None:
    """Numbers in names sort as numbers."""
    assert sorted(["mlx5_10", "mlx5_2", "efa_0"], key=natural_key) == ["efa_0", "mlx5_2", "mlx5_10"]


@pytest.mark.parametrize(
    ("gpus", "nics", "matched"),
    [
        ({}, {}, {}),
        ({0: ["a"]}, {"n": ["b"]}, {}),
        ({0: ["a"], 1: ["a"]}, {"n": ["a"]}, {0: "n", 1: "n"}),
        ({0: ["a"], 1: ["a"]}, {"n10": ["a"], "n2": ["a"]}, {0: "n2", 1: "n10"}),
        # The nearest pairs are joined first: GPU 0 does not take the adapter beside GPU 1.
        (
            {0: ["s0", "r"], 1: ["s1", "r"]},
            {"n0": ["s1", "r"], "n1": ["s2", "r"]},
            {0: "n1", 1: "n0"},
        ),
    ],
)
def test_match(gpus, nics, matched) -> None:
    """Unused adapters go to the nearest GPU, GPUs that are left share."""
    assert match_nics(gpus, nics) == matched


def test_counters_are_compared_one_by_one() -> None:
    """Growth needs a baseline, and a rate a time."""
    assert grown({"1": 1}, {"1": 3, "2": 9}) == {"1": 2}
    assert too_fast({"1/x": 0}, {"1/x": 5}, {"x": 4}, 60.0) == {"1/x": 5.0}
    assert too_fast({"1/x": 0}, {"1/x": 5}, {"x": 5}, 60.0) == {}
    assert too_fast({"1/x": 0}, {"1/x": 15}, {"x": 5}, 120.0) == {"1/x": 7.5}


@pytest.mark.parametrize("seconds", [0.0, 0.001, 30.0, 60.0])
def test_few_errors_in_a_moment_are_no_flood(seconds) -> None:
    """Growth within less than a minute is compared with what a whole minute may bring."""
    assert too_fast({"1/x": 0}, {"1/x": 5}, {"x": 5}, seconds) == {}
    assert too_fast({"1/x": 0}, {"1/x": 6}, {"x": 5}, seconds) == {"1/x": 6.0}


def test_looks_in_a_row_add_up(tree) -> None:
    """Many looks in one minute see together what one look would have seen."""
    check = nic_check(tree, counter_limits={"symbol_error": 10})
    for count in range(0, 11, 2):
        tree.set_counter("mlx5_1", "symbol_error", count)
        assert check()
    tree.set_counter("mlx5_1", "symbol_error", 11)
    assert "1/symbol_error grew by 11 per minute" in check.check().reason


def test_error_counters_are_evidence(tree) -> None:
    """Error counters without a limit are told and not evaluated."""
    tree.set_counter("mlx5_1", "port_rcv_errors", 0)
    check = nic_check(tree)
    tree.set_counter("mlx5_1", "port_rcv_errors", 10**6)
    result = check.check()
    assert result.status == "healthy"
    assert result.evidence["1/port_rcv_errors"] == 10**6


def test_efa(tmp_path, monkeypatch) -> None:
    """An EFA device, which counts no broken links, is evaluated by state and by counters named."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    health_check.set_nvml(FakeNvml({"count": 1, "bus.0": "00000000:10:00.0"}))
    tree = fake_sysfs(tmp_path / "sys", gpus=GPUS[:1])
    tree.add_efa("efa_0", ["0000:00:01.0", "0000:01:00.0"], "0000:12:00.0")
    try:
        check = nic_check(tree, counter_limits={"rx_drops": 10})
        plain = nic_check(tree)
        state = NicLinkStateHealthCheck(sysfs_root=tree.root)
        assert (check.nic_name, check.check().status) == ("efa_0", "healthy")
        assert plain.check().status == "skipped"
        assert state.check().status == "healthy"
        tree.set_counter("efa_0", "rx_drops", 11, folder="hw_counters")
        assert check.check().reason == "efa_0: 1/rx_drops grew by 11 per minute"
        tree.set_state("efa_0", "1: DOWN")
        assert state.check().reason == "efa_0 port 1 was ACTIVE and is 1: DOWN"
        tree.remove_nic("efa_0")
        assert check.check().reason == "efa_0 has vanished"
        assert state.check().reason == "efa_0 port 1 was ACTIVE and is gone"
    finally:
        health_check.set_nvml(None)


NO_COUNTS = [
    b"",
    b"zz top\n",
    b"4\x00",
    b"\xff\xfe4",
    b"9" * 10_000_000,
    b"-5",
    b"1_0",
    b"\xd9\xa3",
]


@pytest.mark.parametrize("content", NO_COUNTS)
def test_files_that_hold_no_count_or_state(tree, caplog, content) -> None:
    """A counter's file with anything but a number is none; a strange state is told in one line."""
    check, state = nic_check(tree), NicLinkStateHealthCheck(sysfs_root=tree.root)
    port = Path(tree.root, "class/infiniband/mlx5_1/ports/1")
    (port / "counters/link_downed").write_bytes(content)
    (port / "state").write_bytes(content)
    assert check.check().status == "skipped"
    with caplog.at_level(logging.WARNING, "nvrx"):
        found = state.check()
    assert not found
    assert len(found.reason) < 120
    assert found.reason.isprintable()


@pytest.mark.parametrize(
    ("state", "active"),
    [("4: ACTIVE", True), ("ACTIVE", True), ("active", True), ("1: DOWN", False),
     ("5: ACTIVE_DEFER", False), ("", False)],
)  # fmt: skip
def test_is_active(state, active) -> None:
    """Only ACTIVE is active, with or without its number."""
    assert is_active(state) is active


def test_port_that_goes_down(tree) -> None:
    """A port that was active is unhealthy when it no longer is; one that was down may stay so."""
    tree.set_state("mlx5_0", "1: DOWN")
    check = NicLinkStateHealthCheck(sysfs_root=tree.root)
    assert check.check().status == "healthy"
    tree.set_state("mlx5_1", "1: DOWN")
    assert check.check().reason == "mlx5_1 port 1 was ACTIVE and is 1: DOWN"
    tree.set_state("mlx5_1", "4: ACTIVE")
    assert check()


def test_second_port_vanished_adapter_and_carrier(tree) -> None:
    """Every port, an adapter that disappears and a lost carrier are seen."""
    tree.add_nic("roce_0", ["0000:00:02.0"], "0000:20:00.0", ports=(1, 2), netdev="eth7")
    check = NicLinkStateHealthCheck(sysfs_root=tree.root)
    tree.set_state("roce_0", "1: DOWN", port=2)
    assert "roce_0 port 2" in check.check().reason
    tree.set_state("roce_0", "4: ACTIVE", port=2)
    tree.set_carrier("roce_0", "eth7", has_carrier=False)
    assert "eth7 was ACTIVE and is NO CARRIER" in check.check().reason
    tree.set_carrier("roce_0", "eth7", has_carrier=True)
    assert check()
    tree.remove_nic("mlx5_0")
    assert check.check().reason == "mlx5_0 port 1 was ACTIVE and is gone"


def test_expected_ports(tree, tmp_path) -> None:
    """Too few active ports are unhealthy, also when they were never active or nothing is there."""
    root = tree.root
    assert NicLinkStateHealthCheck(sysfs_root=root, expected_ports=2).check().status == "healthy"
    assert not NicLinkStateHealthCheck(sysfs_root=root, expected_ports=3)()
    tree.set_state("mlx5_0", "1: DOWN")
    result = NicLinkStateHealthCheck(sysfs_root=root, expected_ports=2).check()
    assert result.reason == "1 ports are active, 2 are expected"
    assert not NicLinkStateHealthCheck(sysfs_root=str(tmp_path / "none"), expected_ports=1)()


def test_state_template_and_no_adapter(tmp_path) -> None:
    """A template is read for the adapters in its own folder; without adapters all is skipped."""
    state = tmp_path / "nics" / "a" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("ACTIVE\n")
    check = NicLinkStateHealthCheck(f"{tmp_path}/nics/{{nic}}/state")
    assert check()
    state.write_text("DOWN\n")
    assert not check()
    assert NicLinkStateHealthCheck(sysfs_root=str(tmp_path)).check().status == "skipped"
