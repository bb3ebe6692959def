"""The topology reader on layouts that people published (tests/data/topology/SOURCES.md says where)."""

from pathlib import Path

import pytest

from lit_gpt_dist.doctor.topology import Topology, parse_device_list, parse_peer_access, parse_topology

FOLDER = Path(__file__).parent.parent / "data" / "topology"


def text(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def layout(name: str) -> Topology:
    found = parse_topology(text(name))
    assert found is not None
    return found


# file: GPUs, NICs, pairs with NVLink, worst PCIe path, NUMA nodes
LAYOUTS = {
    "nvlink_full_mesh_two_sockets": (8, 0, 28, None, ("0", "1")),
    "dgx_a100_nics_four_numa": (8, 12, 28, None, ("1", "3", "5", "7")),
    "nvlink_hybrid_mesh_nics": (8, 2, 16, "SYS", ("0", "1")),
    "nvlink_pairs_four_numa": (4, 0, 2, "SYS", ("0", "1", "2", "3")),
    "nvlink_one_pair_of_three": (3, 0, 1, "NODE", ("0",)),
    "pcie_only_two_sockets_nics": (8, 2, 0, "SYS", ("0", "1")),
    "pcie_mixed_two_numa_spaces": (5, 0, 0, "SYS", ("0", "1")),
    "old_words_two_sockets": (4, 0, 0, "SYS", ()),
    "single_gpu": (1, 0, 0, None, ("0",)),
    "numa_not_reported": (2, 0, 0, "SYS", ("1",)),
    "affinity_columns_empty_nics": (2, 8, 1, None, ()),
    "coloured_header_nics": (2, 2, 1, None, ("0", "1")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_read(name):
    found = layout(name)
    seen = (len(found.gpus), len(found.nics), len(found.nvlinks()), found.worst_path(), found.numa_nodes)
    assert seen == LAYOUTS[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_matrix_is_complete_and_symmetric(name):
    found = layout(name)
    assert len(found.words) == len(found.devices) ** 2
    assert all(found.words[b, a] == word for (a, b), word in found.words.items())


def test_a_full_mesh_is_told_from_a_hybrid_one():
    assert layout("nvlink_full_mesh_two_sockets").fully_nvlinked
    assert not layout("nvlink_hybrid_mesh_nics").fully_nvlinked
    assert layout("nvlink_hybrid_mesh_nics").nvlinks()["GPU0", "GPU7"] == 2


def test_escape_codes_change_nothing():
    plain = text("coloured_header_nics").replace("\x1b[4m", "").replace("\x1b[0m", "")
    assert parse_topology(plain) == layout("coloured_header_nics")
    coloured_cells = plain.replace("NV12", "\x1b[1;32mNV12\x1b[0m").replace("SYS\t", "\x1b[31mSYS\x1b[m\t")
    assert parse_topology(coloured_cells) == layout("coloured_header_nics")


def test_cpus_near_a_gpu_are_read_and_missing_ones_stay_unknown():
    assert layout("pcie_mixed_two_numa_spaces").cpus["GPU0"] == "8-15,24-31"
    assert layout("numa_not_reported").numa == {"GPU0": None, "GPU1": "1"}
    assert layout("affinity_columns_empty_nics").cpus == {"GPU0": None, "GPU1": None}


def test_the_nearest_nics_carry_their_own_names():
    assert layout("coloured_header_nics").nearest_nics("GPU0") == ("mlx5_0", "mlx5_1")
    assert layout("dgx_a100_nics_four_numa").nearest_nics("GPU4") == ("mlx5_6", "mlx5_7")
    assert layout("pcie_only_two_sockets_nics").nearest_nics("GPU6") == ("NIC0", "NIC1")


def test_each_layout_is_described_in_a_sentence():
    assert layout("dgx_a100_nics_four_numa").describe() == "8 GPUs, each pair by NVLink (NV12)"
    assert layout("nvlink_pairs_four_numa").describe() == "4 GPUs, 2 of 6 pairs by NVLink, the others up to SYS"
    assert layout("pcie_only_two_sockets_nics").describe() == "8 GPUs over PCIe, the farthest pair SYS"
    assert "single" in layout("single_gpu").describe()


@pytest.mark.parametrize("garbage", ["garbage_driver_mismatch", "garbage_no_driver", "list_mig"])
def test_an_error_message_is_no_topology(garbage):
    assert parse_topology(text(garbage)) is None
    assert parse_peer_access(text(garbage)) is None


@pytest.mark.parametrize(
    "broken", ["", "\x00\x01", "GPU0", "GPU0 GPU1\n", "GPU0 X\n", "a b c\n" * 5, "\tGPU0\tGPU1\nGPU0\t??\tzz\n"]
)
def test_garbage_is_no_topology(broken):
    assert parse_topology(broken) is None


def test_a_cut_off_matrix_keeps_what_it_has():
    whole = text("nvlink_full_mesh_two_sockets").splitlines()
    found = parse_topology("\n".join(whole[:4]))
    assert found is not None
    assert len(found.gpus) == 8
    assert found.pairs()["GPU0", "GPU7"] == "NV12"
    assert found.pairs()["GPU6", "GPU7"] == "?"
    assert not found.fully_nvlinked


def test_peer_access_is_read_with_and_without_escape_codes():
    assert set(parse_peer_access(text("p2p_gpu_not_supported")).values()) == {"GNS"}
    assert parse_peer_access(text("p2p_ok_coloured")) == {("GPU0", "GPU1"): "OK", ("GPU1", "GPU0"): "OK"}
    eight = parse_peer_access(text("p2p_eight_ok"))
    assert len(eight) == 56
    assert set(eight.values()) == {"OK"}


def test_instances_of_a_cut_gpu_are_listed():
    assert parse_device_list(text("list_mig")) == {"GPU0": ["1g.10gb"] * 7}
    assert parse_device_list("GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n") == {
        "GPU0": [],
        "GPU1": [],
    }
