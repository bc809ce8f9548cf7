"""RDMA devices on made-up trees: what is found, which port each rank gets, and every reason why there is none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import rdma_tree
from hypothesis import given
from hypothesis import strategies as st
from rdma_tree import GLOBAL, INFINIBAND, IPV4, LINK_LOCAL, ROCE, V1, V2, Tree

from hdma import nics
from hdma.errors import UsageError, WireError
from hdma.nics import agreement, sysfs
from hdma.topology import Topology


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HDMA_NIC", "HDMA_GID_INDEX", "HDMA_WIRE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(agreement, "library_error", lambda: "")


def choose(tree: Tree, *args: Any, **more: Any) -> list[nics.Offer]:
    return nics.choose(nics.find(str(tree)), *args, root=str(tree), **more)


def why(tree: Tree, *args: Any) -> nics.Reason:
    found = nics.find(str(tree))
    assert nics.choose(found, *args, root=str(tree)) == []
    return nics.why_none(found, *args)


def offer(position: int = 0, distance: int = 0, **more: Any) -> nics.Offer:
    values = {"device": f"mlx5_{position}", "port": 1, "gid_index": 3, "gid": IPV4, "link_layer": "Ethernet"}
    values |= {"fabric": "RoCE v2 over IPv4", "rate_gbit_s": 100.0, "told": False}
    return nics.Offer(**values | {"position": position, "distance": distance} | more)


def names(topology: Topology) -> list[str]:
    return [f"rank {rank}" for rank in range(topology.size)]


# What there is.


def test_a_roce_device(tree: Tree) -> None:
    tree.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 1, netdev="ens1", ports=2)
    (nic,) = nics.find(str(tree))
    assert (nic.name, nic.kind, nic.pci, nic.numa_node, nic.netdevs) == ("mlx5_0", "CA", "0000:01:00.0", 1, ("ens1",))
    assert nic.place == nics.Place(("pci0000:00", "0000:00:01.0", "0000:01:00.0"), 1)
    assert nic.uverbs == f"{tree}/dev/infiniband/uverbs0" and nic.open_error == ""
    assert [port.number for port in nic.ports] == [1, 2]
    port = nic.ports[0]
    assert (port.state, port.physical_state, port.link_layer, port.lid) == ("ACTIVE", "LinkUp", "Ethernet", 0)
    assert port.rate == "100 Gb/sec (2X HDR)" and port.rate_gbit_s == 100.0
    # Without the empty entries 4 and 5.
    assert [(gid.index, gid.kind, gid.netdev) for gid in port.gids] == [
        *((0, V1, "ens1"), (1, V2, "ens1"), (2, V1, "ens1"), (3, V2, "ens1"))
    ]
    assert str(port.gids[3]) == "3: 10.0.0.1 (RoCE v2)"


def test_an_infiniband_device(tree: Tree) -> None:
    tree.nic("ibp1s0", "pci0000:00/0000:01:00.0", -1, gids=INFINIBAND, layer="InfiniBand", netdev="ib0")
    (nic,) = nics.find(str(tree))
    assert nic.netdevs == ("ib0",) and nic.numa_node == -1 and nic.ports[0].lid == 0x12
    (chosen,) = choose(tree)
    assert (chosen.gid_index, chosen.link_layer, chosen.fabric) == (
        *(0, "InfiniBand", "InfiniBand subnet fe80:0000:0000:0000"),
    )


def test_a_device_on_virtio(tree: Tree) -> None:
    """Not of PCI itself, but below a device that is."""
    folder = tree.pci("pci0000:00/0000:00:03.0")
    tree.nic("virtio0")
    tree.write(f"{folder}/virtio0/vendor", "x")
    tree.link("sys/devices/virtual/infiniband/virtio0/device", f"{folder}/virtio0")
    assert nics.find(str(tree))[0].pci == "0000:00:03.0"


def test_order_is_that_of_numbers_and_virtual_ones_are_last(tree: Tree) -> None:
    for number in (10, 2, 1):
        tree.nic(f"mlx5_{number}", f"pci0000:00/0000:{number:02x}:00.0")
    tree.nic("a_rxe", netdev="eth0")
    found = nics.find(str(tree))
    assert [nic.name for nic in found] == ["mlx5_1", "mlx5_2", "mlx5_10", "a_rxe"]
    assert found[-1].place is None and found[-1].pci == "" and found[-1].netdevs == ("eth0",)


def test_no_folder(tmp_path: Path) -> None:
    assert nics.find(str(tmp_path)) == []
    assert nics.gpu_place("0000:01:00.0", str(tmp_path)) is None and nics.gpu_place("", str(tmp_path)) is None


def test_gids_that_cannot_be_read(tree: Tree) -> None:
    """Kernels that refuse the entry itself, too; and a table that is not there."""
    tree.nic("rxe0")
    for index in (0, 4):
        (tree.root / f"sys/class/infiniband/rxe0/ports/1/gids/{index}").unlink()
        (tree.root / f"sys/class/infiniband/rxe0/ports/1/gids/{index}").mkdir()
    assert [gid.index for gid in nics.find(str(tree))[0].ports[0].gids] == [1, 2, 3]


# Which entry of the table.


@pytest.mark.parametrize(
    ("gids", "index", "family"),
    [
        (ROCE, 3, "IPv4"),
        (((LINK_LOCAL, V2), (GLOBAL, V2), (IPV4, V2), (IPV4, V2)), 2, "IPv4"),
        (((LINK_LOCAL, V1), (LINK_LOCAL, V2), (GLOBAL, V1), (GLOBAL, V2)), 3, "IPv6"),
        (((LINK_LOCAL, V1), (LINK_LOCAL, V2)), 1, "link-local IPv6"),
        (((IPV4, V1), (LINK_LOCAL, V2)), 1, "link-local IPv6"),
    ],
)
def test_gid(tree: Tree, gids: Any, index: int, family: str) -> None:
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0", gids=gids)
    (chosen,) = choose(tree)
    assert chosen.gid_index == index and chosen.gid == gids[index][0] and chosen.fabric == f"RoCE v2 over {family}"


def test_gid_that_is_forced(tree: Tree) -> None:
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    assert choose(tree, None, 1)[0].gid_index == 1
    for index in (0, 2, 4, 99):  # RoCE v1, RoCE v1, empty, beyond the table
        reason = why(tree, None, index)
        assert reason.kind == "usage" and f"HDMA_GID_INDEX={index} is no RoCE v2 entry" in reason.text
        assert "3: 10.0.0.1 (RoCE v2)" in reason.text and "0: fe80::e42:a1ff:fe00:1 (IB/RoCE v1)" in reason.text


def test_gid_that_is_forced_on_infiniband(tree: Tree) -> None:
    tree.nic("ib0", "pci0000:00/0000:01:00.0", gids=(*INFINIBAND, (GLOBAL, V1)), layer="InfiniBand")
    assert choose(tree, None, 1)[0].gid_index == 1
    assert "HDMA_GID_INDEX=2 is no entry of the GID table of ib0 port 1" in why(tree, None, 2).text


# HDMA_NIC.


@pytest.mark.parametrize(
    ("wanted", "ports", "told"),
    [
        (None, ["a:1", "a:2", "b:1", "b:2"], False),
        ("b", ["b:1", "b:2"], True),
        ("b:2", ["b:2"], True),
        ("a,b:2", ["a:1", "a:2", "b:2"], False),
        ("^a", ["b:1", "b:2"], False),
        ("^a:1,b", ["a:2"], False),
        ("a:1,none", ["a:1"], True),
    ],
)
def test_filter(tree: Tree, wanted: str, ports: list[str], told: bool) -> None:
    for number, name in enumerate("ab"):
        tree.nic(name, f"pci0000:00/0000:0{number}:00.0", ports=2)
    chosen = choose(tree, wanted)
    assert [str(each) for each in chosen] == ports and {each.told for each in chosen} == {told}
    assert [each.position for each in chosen] == [*range(len(ports))]


# How near.


def test_dgx(tmp_path: Path) -> None:
    """Each GPU gets the device below its own switch, whatever their names; the storage devices are farther."""
    tree, gpus = rdma_tree.dgx(tmp_path)
    for i, gpu in enumerate(gpus):
        chosen = choose(tree, gpu=gpu)
        assert chosen[0].device == f"mlx5_{7 - i if i < 4 else i + 6}" and chosen[0].distance == 4
        assert len(chosen) == 10 and all(each.distance >= 200 for each in chosen[1:])
        near = {each.device for each in chosen if each.distance < 300}
        assert len(near) == 5 and f"mlx5_{20 + i // 4}" in near


def test_distance_grows_with_what_lies_between(tree: Tree) -> None:
    gpu = "0000:04:00.0"
    top = "pci0000:00/0000:00:01.0"
    tree.pci(f"{top}/0000:01:00.0/0000:02:00.0/{gpu}", 0)
    for name, path, node in [
        ("switch", f"{top}/0000:01:00.0/0000:02:01.0/0000:05:00.0", 0),
        ("switches", f"{top}/0000:01:00.0/0000:02:02.0/0000:06:00.0/0000:07:00.0/0000:08:00.0", 0),
        ("port", "pci0000:00/0000:00:02.0/0000:09:00.0", 0),
        ("node", "pci0000:40/0000:40:01.0/0000:41:00.0", 0),
        ("other", "pci0000:80/0000:80:01.0/0000:81:00.0", 1),
        ("virtual", "", 0),
    ]:
        tree.nic(name, path, node)
    for address in (gpu, gpu.upper(), f"0000{gpu}"):  # the last as nvidia-smi writes it
        chosen = choose(tree, gpu=address)
        assert [each.device for each in chosen] == ["switch", "switches", "port", "node", "other", "virtual"]
        assert [each.distance for each in chosen] == [4, 6, 106, 208, 308, 1000]
    # Of a GPU that the kernel does not show nothing is known.
    assert {each.distance for each in choose(tree, gpu="0000:ff:00.0")} == {1000}


def test_host_memory_prefers_the_process_own_node(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (0, 1):
        tree.nic(f"mlx5_{node}", f"pci0000:{node}0/0000:{node}1:00.0", node)
    tree.nic("rxe0")
    assert [each.distance for each in choose(tree)] == [200, 200, 1000]
    tree.write("sys/devices/system/node/node0/cpulist", "0-3,8-11")
    tree.write("sys/devices/system/node/node1/cpulist", "4-7,12-15")
    monkeypatch.setattr(sysfs.os, "sched_getaffinity", lambda _: {5, 12})
    assert [each.device for each in choose(tree)] == ["mlx5_1", "mlx5_0", "rxe0"]
    monkeypatch.setattr(sysfs.os, "sched_getaffinity", lambda _: {3, 4})
    assert [each.device for each in choose(tree)] == ["mlx5_0", "mlx5_1", "rxe0"]


def test_of_equally_near_ones_the_fastest_is_first(tree: Tree) -> None:
    tree.nic("slow", "pci0000:00/0000:01:00.0", rate="25 Gb/sec (1X EDR)")
    tree.nic("zfast", "pci0000:00/0000:02:00.0")
    assert [each.device for each in choose(tree)] == ["zfast", "slow"]


# Why there is none.


def test_no_device(tree: Tree) -> None:
    reason = why(tree)
    assert reason.kind == "none" and "/sys/class/infiniband is empty" in reason.text and reason.remedy


@pytest.mark.parametrize(
    ("device", "text", "remedy"),
    [
        (
            {"state": "1: DOWN", "physical": "3: Disabled", "gids": ()},
            "mlx5_0 port 1 is DOWN (physical state Disabled): net-mlx5_0 is down or has no link",
            "ip link set net-mlx5_0 up",
        ),
        (
            {"state": "1: DOWN", "physical": "2: Polling", "layer": "InfiniBand"},
            "mlx5_0 port 1 is DOWN (physical state Polling): it has no link",
            "cable and switch",
        ),
        (
            {"state": "2: INIT", "layer": "InfiniBand"},
            "mlx5_0 port 1 is INIT (physical state LinkUp): no subnet manager has configured it",
            "start a subnet manager",
        ),
        (
            {"gids": ()},
            "mlx5_0 port 1 has no RoCE v2 GID (its table: empty): net-mlx5_0 has no address",
            "ip address add",
        ),
        ({"gids": ((IPV4, V1),)}, "has no RoCE v2 GID (its table: 0: 10.0.0.1 (IB/RoCE v1))", "dev net-mlx5_0"),
        ({"gids": (), "layer": "InfiniBand"}, "has no GID at index 0", "subnet manager"),
        ({"node_type": "4: RNIC"}, "mlx5_0 port 1 is an iWARP device", "only InfiniBand and RoCE v2"),
        ({"layer": "Unspecified"}, "mlx5_0 port 1 is of link layer Unspecified", "only InfiniBand and RoCE v2"),
        ({"device_file": False}, "uverbs0 of mlx5_0 cannot be opened: No such file", "--device /dev/infiniband"),
    ],
)
def test_port_that_cannot_be_used(tree: Tree, device: dict[str, Any], text: str, remedy: str) -> None:
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0", **device)
    reason = why(tree)
    assert reason.kind == "device" and text in reason.text and remedy in reason.remedy


def test_no_permission(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    (tree.root / "dev/infiniband/uverbs0").chmod(0o660)
    opens = sysfs.os.open

    def refuses(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("uverbs0"):
            raise PermissionError(13, "Permission denied")
        return opens(path, *args, **more)

    monkeypatch.setattr(sysfs.os, "open", refuses)
    reason = why(tree)
    assert reason.text.startswith("user ") and "/dev/infiniband/uverbs0 of mlx5_0: Permission denied" in reason.text
    assert "(mode 660, group " in reason.text and "add the user to group" in reason.remedy


def test_no_character_device(tree: Tree) -> None:
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    (tree.root / "sys/class/infiniband_verbs/uverbs0").unlink()
    assert why(tree).remedy == "modprobe ib_uverbs"


def test_names_of_nothing(tree: Tree) -> None:
    for number in (0, 1):
        tree.nic(f"mlx5_{number}", f"pci0000:00/0000:0{number}:00.0")
    reason = why(tree, "mlx5_7,mlx5_0:2")
    assert reason == nics.Reason(
        "usage", "HDMA_NIC=mlx5_7,mlx5_0:2 names no RDMA device of this host", "set it to one of mlx5_0:1, mlx5_1:1"
    )
    assert "excludes every RDMA device" in why(tree, "^mlx5_0,mlx5_1").text


def test_every_port_says_why(tree: Tree) -> None:
    tree.nic("a", "pci0000:00/0000:01:00.0", state="1: DOWN", physical="2: Polling", ports=2)
    tree.nic("b", "pci0000:00/0000:02:00.0", gids=())
    reason = why(tree)
    assert [part in reason.text for part in ("a port 1 is DOWN", "a port 2 is DOWN", "b port 1 has no")] == [True] * 3
    assert reason.remedy.count("ip link set net-a up") == 1


# What the ranks agree on.


def test_dgx_rails(tmp_path: Path) -> None:
    """Two nodes built alike: each rail has its own device, that of the GPU on both."""
    tree, gpus = rdma_tree.dgx(tmp_path)
    topology = Topology(2, 8)
    cards = [nics.card(gpu=gpus[topology.local_rank(rank)], root=str(tree)) for rank in range(16)]
    chosen = nics.decide(json.loads(json.dumps(cards)), topology, names(topology))
    expected = [f"mlx5_{7 - i if i < 4 else i + 6}" for i in range(8)]
    assert [each.device for each in chosen] == expected * 2


def test_host_memory_is_spread_over_the_fast_ones(tmp_path: Path) -> None:
    tree, _ = rdma_tree.dgx(tmp_path)
    topology = Topology(2, 8)
    chosen = nics.decide([nics.card(root=str(tree))] * 16, topology, names(topology), "verbs")
    assert len({each.device for each in chosen[:8]}) == 8 and chosen[:8] == chosen[8:]
    assert {each.link_layer for each in chosen} == {"InfiniBand"}


def test_a_lost_port_moves_its_rail_on_both_nodes() -> None:
    """Position 1 is missing on node 1: rail 1 takes another on both nodes, the other rails keep theirs."""
    topology = Topology(2, 3)
    offers = [[offer(p, 4 if p == topology.local_rank(rank) else 200) for p in range(3)] for rank in range(6)]
    for rank in (3, 4, 5):
        offers[rank] = [each for each in offers[rank] if each.position != 1]
    chosen = nics.along_rails(offers, topology, names(topology))
    assert [each.position for each in chosen] == [0, 2, 2, 0, 2, 2]


def test_without_a_common_position_each_takes_its_nearest() -> None:
    topology = Topology(2, 1)
    chosen = nics.along_rails([[offer(0, 200), offer(2, 4)], [offer(1, 4), offer(3, 200)]], topology, names(topology))
    assert [each.position for each in chosen] == [2, 1]


def test_ranks_that_were_told() -> None:
    """Two nodes on one host, each with a device of its own; and a rank that was told beside one that was not."""
    topology = Topology(2, 1)
    told = [[offer(0, device="rxe0", told=True)], [offer(0, device="rxe1", told=True)]]
    assert [each.device for each in nics.along_rails(told, topology, names(topology))] == ["rxe0", "rxe1"]
    mixed = [told[1], [offer(0, 4), offer(1, 200)]]
    assert [each.device for each in nics.along_rails(mixed, topology, names(topology))] == ["rxe1", "mlx5_0"]


def test_ports_of_different_kinds() -> None:
    topology = Topology(2, 2)
    infiniband = {"fabric": "InfiniBand subnet fe80:0000:0000:0000", "link_layer": "InfiniBand"}
    offers = [[offer()], [offer()], [offer()], [offer(**infiniband)]]
    with pytest.raises(UsageError) as caught:
        nics.along_rails(offers, topology, names(topology))
    message = str(caught.value)
    assert "rank 1 and rank 3 are to exchange data" in message and "mlx5_0:1 (RoCE v2 over IPv4)" in message
    assert "mlx5_0:1 (InfiniBand subnet" in message and "HDMA_NIC" in message and "HDMA_WIRE=tcp" in message
    # Where a position of one kind is there, that is taken, though it is farther.
    offers[1] = [offer(), offer(1, 300, **infiniband)]
    offers[3] = [offer(0, 0, **infiniband), offer(1, 300, **infiniband)]
    assert [each.position for each in nics.along_rails(offers, topology, names(topology))] == [0, 1, 0, 1]


def test_addresses_of_different_kinds() -> None:
    topology = Topology(2, 1)
    with pytest.raises(UsageError, match="which cannot be connected"):
        nics.along_rails([[offer()], [offer(fabric="RoCE v2 over link-local IPv6")]], topology, names(topology))


@given(nodes=st.integers(1, 3), ranks=st.integers(1, 16), devices=st.integers(1, 8), data=st.data())
def test_spread_is_even(nodes: int, ranks: int, devices: int, data: st.DataObject) -> None:
    """Where all devices are equally near; also where half of the ranks are near one half of them, in any order."""
    topology = Topology(nodes, ranks)
    chosen = nics.along_rails([[offer(p) for p in range(devices)]] * topology.size, topology, names(topology))
    counts = Counter(each.position for each in chosen[:ranks])
    assert max(counts.values()) - min(counts.get(p, 0) for p in range(devices)) <= 1
    half = data.draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks))
    rows = [[offer(p, 200 if (p % 2 == 0) == near else 300) for p in range(2 * devices)] for near in half]
    chosen = nics.along_rails(rows * nodes, topology, names(topology))
    for near in (True, False):
        counts = Counter(each.position for each, mine in zip(chosen[:ranks], half) if mine == near)
        own = [p for p in range(2 * devices) if (p % 2 == 0) == near]
        assert {*counts} <= {*own} and max(counts.values(), default=0) - min(counts.get(p, 0) for p in own) <= 1


OFFERS = st.lists(
    st.builds(
        offer,
        st.integers(0, 5),
        st.sampled_from([4, 105, 207, 307, 1000]),
        rate_gbit_s=st.sampled_from([25.0, 100.0]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.position,
)


@given(grid=st.tuples(st.integers(2, 3), st.integers(1, 4)), data=st.data())
def test_agreement(grid: tuple[int, int], data: st.DataObject) -> None:
    """Each rank takes what it offers; a rail that has common positions takes one of the nearest of these on all nodes.
    The order in which a rank lists its offers, and JSON, make no difference."""
    topology = Topology(*grid)
    offers = [data.draw(OFFERS) for _ in range(topology.size)]
    chosen = nics.along_rails(offers, topology, names(topology))
    assert all(chosen[rank] in offers[rank] for rank in range(topology.size))
    for local_rank in range(grid[1]):
        rail = [topology.rank(node, local_rank) for node in range(grid[0])]
        far = [{each.position: each.distance for each in offers[rank]} for rank in rail]
        common = set.intersection(*map(set, far))
        if common:
            assert len({chosen[rank].position for rank in rail}) == 1
            best = min(sum(own[p] for own in far) for p in common)
            assert sum(chosen[rank].distance for rank in rail) == best
        else:
            assert all(chosen[rank].distance == min(own.values()) for rank, own in zip(rail, far))
    cards = [{"offers": [vars(each) for each in reversed(own)], "reason": None} for own in offers]
    assert nics.decide(json.loads(json.dumps(cards)), topology, names(topology)) == chosen


# RDMA or TCP.

NONE = {"offers": [], "reason": vars(nics.Reason("none", "there is no RDMA device", "get one"))}
DOWN = {"offers": [], "reason": vars(nics.Reason("device", "mlx5_0 port 1 is DOWN", "look at the link"))}
WRONG = {"offers": [], "reason": vars(nics.Reason("usage", "HDMA_NIC=x names no RDMA device", "set it right"))}
GOOD = {"offers": [vars(offer())], "reason": None}


def test_tcp_is_used() -> None:
    topology = Topology(2, 1)
    assert nics.decide([NONE, NONE], topology, names(topology), "auto") == []
    assert nics.decide([GOOD, GOOD], topology, names(topology), "tcp") == []
    assert nics.decide([DOWN, NONE], Topology(1, 2), names(topology), "verbs") == []
    assert len(nics.decide([GOOD, GOOD], topology, names(topology), "auto")) == 2


@pytest.mark.parametrize(
    ("cards", "wire", "kind", "text"),
    [
        (
            [NONE, NONE],
            "verbs",
            WireError,
            "rank 0 cannot use RDMA: there is no RDMA device. What helps: get one; or",
        ),
        ([GOOD, DOWN], "auto", WireError, "rank 1 cannot use RDMA: mlx5_0 port 1 is DOWN. What helps: look at"),
        ([NONE, DOWN], "auto", WireError, "rank 1 cannot use RDMA: mlx5_0 port 1 is DOWN"),
        ([NONE, GOOD], "auto", WireError, "rank 0 cannot use RDMA: there is no RDMA device, while rank 1 has mlx5_0"),
        ([WRONG, GOOD], "auto", UsageError, "rank 0 cannot use RDMA: HDMA_NIC=x names no RDMA device"),
    ],
)
def test_tcp_is_not_used_silently(cards: list[Any], wire: str, kind: type[Exception], text: str) -> None:
    topology = Topology(2, 1)
    with pytest.raises(kind) as caught:
        nics.decide(cards, topology, names(topology), wire)
    assert text in str(caught.value) and str(caught.value).endswith("or HDMA_WIRE=tcp on all ranks")


def test_card(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nics.card(root=str(tree))["reason"]["kind"] == "none"
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    tree.nic("mlx5_1", "pci0000:00/0000:02:00.0")
    monkeypatch.setenv("HDMA_NIC", "mlx5_1")
    monkeypatch.setenv("HDMA_GID_INDEX", "1")
    (own,) = nics.card(root=str(tree))["offers"]
    assert nics.Offer(**own) == choose(tree, "mlx5_1", 1)[0] and own["told"] and own["gid_index"] == 1
    monkeypatch.setenv("HDMA_WIRE", "tcp")
    assert nics.card(root=str(tree)) == {"offers": [], "reason": None}


def test_no_library(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "library_error", lambda: "cannot open shared object file")
    assert nics.card(root=str(tree))["reason"]["kind"] == "none"
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    card = nics.card(root=str(tree))
    assert card["offers"] == [] and card["reason"]["kind"] == "device"
    assert "there is mlx5_0:1, but no libibverbs.so.1: cannot open" in card["reason"]["text"]
    assert "apt install libibverbs1 ibverbs-providers" in card["reason"]["remedy"]


# How long a queue pair tries.


@pytest.mark.parametrize(("timeout_s", "exponent"), [(300, 18), (30, 16), (10, 15), (1, 11), (0.001, 1)])
def test_qp_timeout(timeout_s: float, exponent: int) -> None:
    assert nics.qp_timeout(timeout_s, 0, 7) == exponent


@given(timeout_s=st.floats(0.001, 1e6), retries=st.integers(0, 7))
def test_qp_timeout_is_the_greatest_that_fits(timeout_s: float, retries: int) -> None:
    chosen = nics.qp_timeout(timeout_s, 0, retries)
    longest_s = (retries + 1) * 4 * 4.096e-6 * 2**chosen
    assert 1 <= chosen <= 18 and longest_s < timeout_s / 2 and (chosen == 18 or 2 * longest_s >= timeout_s / 2)


def test_qp_timeout_that_cannot_be() -> None:
    assert nics.qp_timeout(30, 17, 7) == 17  # more than half, but below
    with pytest.raises(UsageError) as caught:
        nics.qp_timeout(30, 18, 7)
    message = str(caught.value)
    assert "HDMA_QP_TIMEOUT=18 with HDMA_QP_RETRIES=7 lets a NIC try for up to 34.4 s" in message
    assert "(8 x 4 x 4.096 us x 2^18)" in message and "HDMA_TIMEOUT_S=30" in message
    with pytest.raises(UsageError, match=r"too short for RDMA: with HDMA_QP_RETRIES=7 .* raise HDMA_TIMEOUT_S"):
        nics.qp_timeout(0.0005, 0, 7)
