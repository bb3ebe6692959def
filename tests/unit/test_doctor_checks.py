"""Each light of the doctor, from facts made up for the purpose; and the command on this machine."""

import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest

from lit_gpt_dist.doctor import devices, gpus, machine, versions
from lit_gpt_dist.doctor.check import Check, Light
from lit_gpt_dist.doctor.command import main
from lit_gpt_dist.doctor.devices import GPU, is_visible
from lit_gpt_dist.doctor.environment import environment_checks
from lit_gpt_dist.doctor.topology import parse_topology
from lit_gpt_dist.doctor.versions import Versions, cuda_number, driver_check, version_checks

GIB = 2**30
PAIR = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t{word}\t0-3\t0\nGPU1\t{word}\t X \t4-7\t1\n"
PEERS = " \tGPU0\tGPU1\n GPU0\tX\t{word}\n GPU1\t{word}\tX\n"


def gpu(**changes) -> GPU:
    fields = dict(index=0, name="NVIDIA H200", memory_bytes=141 * GIB, used_bytes=0, compute_capability=(9, 0),
                  bus_id="0000:01:00.0", uuid="GPU-abc", mig=False)  # fmt: skip
    return GPU(**{**fields, **changes})


def lights(checks: list[Check]) -> dict[str, Light]:
    return {check.name: check.light for check in checks}


# ---- NVLink ----------------------------------------------------------------------------------------------------------


class PlayedLibrary:
    """NVML of a machine where some pairs of devices have NVLink."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_P2P_STATUS_NOT_SUPPORTED = 2, 0, 5

    def __init__(self, joined: set[tuple[int, int]]) -> None:
        self.joined = joined

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        assert kind == self.NVML_P2P_CAPS_INDEX_NVLINK
        return self.NVML_P2P_STATUS_OK if (one, other) in self.joined else self.NVML_P2P_STATUS_NOT_SUPPORTED


@pytest.mark.parametrize(
    ("visible", "joined", "found"),
    [
        ((0, 1), {(0, 1)}, True),
        ((0, 1, 2), {(0, 1), (0, 2), (1, 2)}, True),
        ((0, 1, 2, 3), {(0, 1), (2, 3)}, False),  # bridged pairs: a ring crosses PCIe
        ((0, 1), set(), False),
        ((0,), set(), False),
    ],
)
def test_devices_are_joined_by_nvlink_where_every_pair_is(monkeypatch, visible, joined, found):
    monkeypatch.setattr(devices, "management_library", lambda: nullcontext(PlayedLibrary(joined)))
    monkeypatch.setattr(devices, "visible_devices", lambda: [gpu(index=index) for index in visible])
    assert devices.joined_by_nvlink() is found


def test_a_driver_that_does_not_say_is_taken_for_one_without_nvlink(monkeypatch):
    monkeypatch.setattr(devices, "management_library", lambda: nullcontext(object()))
    monkeypatch.setattr(devices, "visible_devices", lambda: [gpu(index=0), gpu(index=1)])
    assert devices.joined_by_nvlink() is False


# ---- GPUs -----------------------------------------------------------------------------------------------------------


def test_no_gpu_is_unknown_and_not_an_error():
    [check] = gpus.device_checks([], [], "NVML Shared Library Not Found")
    assert check.light is Light.UNKNOWN
    assert "CPU" in check.advice


def test_a_driver_that_disagrees_with_its_library_is_red():
    [check] = gpus.device_checks([], [], "Driver/library version mismatch")
    assert check.light is Light.RED
    assert "reboot" in check.advice


@pytest.mark.parametrize(
    ("changes", "light"),
    [
        ({}, Light.GREEN),
        ({"mig": True}, Light.YELLOW),
        ({"compute_capability": (7, 5)}, Light.YELLOW),
        ({"used_bytes": 40 * GIB}, Light.YELLOW),
    ],
)
def test_a_gpu_gets_the_light_of_its_state(changes, light):
    assert gpus.gpu_check(gpu(**changes)).light is light


def test_hidden_and_unequal_gpus_are_pointed_out():
    every = [gpu(), gpu(index=1, name="NVIDIA L40S"), gpu(index=2)]
    found = gpus.device_checks(every, every[:2], "")
    assert [check.found for check in found if check.name == "GPUs"] == ["2 of 3 visible", "of different kinds"]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, True),
        ("0", True),
        ("1,0", True),
        ("1", False),
        ("", False),
        ("GPU-ab", True),
        ("GPU-zz", False),
        ("NoDevFiles", False),
    ],
)
def test_visibility_follows_the_environment(visible, seen):
    assert is_visible(gpu(), visible) is seen


@pytest.mark.parametrize(
    ("word", "peer", "expected"),
    [
        ("NV18", "OK", (Light.GREEN, Light.GREEN)),
        ("NV18", "NS", (Light.GREEN, Light.RED)),
        ("PHB", "CNS", (Light.YELLOW, Light.YELLOW)),
        ("SYS", "OK", (Light.YELLOW, Light.GREEN)),
    ],
)
def test_links_and_peer_access_are_judged_together(word, peer, expected):
    found, topology = gpus.topology_checks(PAIR.format(word=word), PEERS.format(word=peer), 2)
    assert topology is not None
    assert (lights(found)["topology"], lights(found)["peer access"]) == expected


def test_a_topology_that_cannot_be_read_is_unknown():
    found, topology = gpus.topology_checks("Failed to initialize NVML: Unknown Error", "", 2)
    assert topology is None
    assert [check.light for check in found] == [Light.UNKNOWN]


def test_a_missing_nvidia_smi_is_an_answer_and_no_crash(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "nvidia-smi" in gpus.nvidia_smi("topo", "-m")


# ---- versions -------------------------------------------------------------------------------------------------------


def test_cuda_versions_are_counted_as_the_driver_counts():
    assert (cuda_number("12.4"), cuda_number("13.0")) == (12_040, 13_000)


@pytest.mark.parametrize(
    ("cuda", "light"),
    [("12.4", Light.GREEN), ("12.8", Light.YELLOW), ("13.0", Light.RED), ("11.8", Light.GREEN), (None, Light.GREEN)],
)
def test_a_driver_too_old_for_torch_is_found(cuda, light):
    found = Versions("2.11.0", cuda, "2.6.6", "1.9.0", {})
    assert driver_check(found, ("550.54", 12_040)).light is light


def test_a_cpu_build_beside_gpus_is_red():
    found = version_checks(Versions("2.13.0+cpu", None, "2.6.6", "1.9.0", {}), None, gpus=2)
    assert lights(found)["torch"] is Light.RED


def test_two_nccl_packages_are_pointed_out():
    two = {"nvidia-nccl-cu12": "2.27", "nvidia-nccl-cu13": "2.28"}
    assert lights(version_checks(Versions("2.11.0", "13.0", "2.6.6", "1.9.0", two), None, 1))["NCCL"] is Light.YELLOW


def test_torchs_cuda_version_is_read_without_importing_torch():
    import torch

    assert versions.torch_cuda_version() == torch.version.cuda


# ---- host -----------------------------------------------------------------------------------------------------------


def test_a_container_with_64_mib_of_shared_memory_is_red(monkeypatch):
    usage = type("Usage", (), {"total": 64 * 2**20, "free": 60 * 2**20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    assert machine.shared_memory_check().light is Light.RED


def test_a_taken_port_is_found():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert machine.port_check({"MASTER_PORT": str(port)}).light is Light.YELLOW
    assert machine.port_check({"MASTER_PORT": "abc"}).light is Light.RED


def test_writing_for_a_speed_leaves_nothing_behind(tmp_path):
    assert machine.write_speed(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_red(tmp_path):
    assert machine.file_system_check(tmp_path / "none").light is Light.RED


def test_cpu_lists_are_read():
    assert machine.parse_cpu_list("0-2,8") == {0, 1, 2, 8}


@pytest.mark.parametrize(
    ("allowed", "nodes", "light"),
    [
        ({0, 1}, 1, Light.GREEN),
        (set(range(8)), 2, Light.YELLOW),
        ({0, 1}, 2, Light.RED),  # GPU1 is near 4-7, where this process may not run
    ],
)
def test_pinning_is_judged_by_the_cpus_near_the_gpus(allowed, nodes, light):
    topology = parse_topology(PAIR.format(word="SYS"))
    assert machine.pinning_check(topology, allowed, nodes).light is light


def test_pinning_without_a_topology_is_unknown_on_several_nodes():
    assert machine.pinning_check(None, {0}, 2).light is Light.UNKNOWN


# ---- environment ----------------------------------------------------------------------------------------------------


def test_variables_that_change_nccl_are_explained():
    found = environment_checks(
        {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_TYPO": "1", "HOME": "/"}
    )
    assert lights(found) == {
        "NCCL_P2P_DISABLE": Light.YELLOW,
        "NCCL_IB_DISABLE": Light.GREEN,
        "NCCL_DEBUG": Light.GREEN,
        "NCCL_TYPO": Light.YELLOW,
    }


def test_blocking_launches_are_red_and_zero_is_off():
    assert lights(environment_checks({"CUDA_LAUNCH_BLOCKING": "1"})) == {"CUDA_LAUNCH_BLOCKING": Light.RED}
    assert [check.light for check in environment_checks({"CUDA_LAUNCH_BLOCKING": "0"})] == [Light.GREEN]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_doctor_runs_here_and_says_what_it_cannot_know(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "all_devices", lambda: ([], "NVML Shared Library Not Found"))
    for name in [name for name in os.environ if name.startswith(("NCCL_", "CUDA_", "MASTER_"))]:
        monkeypatch.delenv(name)
    main(["--folder", str(tmp_path)])
    out = capsys.readouterr().out
    assert "cannot be known here" in out
    assert "shared memory" in out


def test_json_has_a_light_for_each_check(capsys, tmp_path):
    main(["--json", "--folder", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert {check["light"] for check in found} <= {"green", "yellow", "red", "unknown"}


def test_looking_imports_no_torch(tmp_path):
    code = f"import sys; from lit_gpt_dist.doctor.command import main; main(['--folder', {str(tmp_path)!r}]); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip().endswith("False")


@pytest.mark.parametrize(
    ("load", "threads", "light"), [(0.2, "", Light.GREEN), (1.9, "", Light.YELLOW), (1.9, "1", Light.GREEN)]
)
def test_other_work_on_the_cpus_is_named_with_its_remedy(load, threads, light):
    check = machine.load_check(load, 2, threads)
    assert check.light is light
    assert ("OMP_NUM_THREADS=1" in check.advice) == (light is Light.YELLOW)
