"""Checks of GPUs and what joins them. Runs `nvidia-smi` for the topology; judges by pure functions."""

import subprocess
from collections.abc import Sequence

from lit_gpt_dist.doctor.check import Check, Light
from lit_gpt_dist.doctor.devices import GPU
from lit_gpt_dist.doctor.topology import PEER_MEANING, Topology, parse_peer_access, parse_topology

GIB = 2**30
BUSY_SHARE = 0.05  # of a device's memory in use by others


def nvidia_smi(*arguments: str) -> str:
    """Its output, or what it or the system said instead."""
    try:
        found = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return found.stdout or found.stderr


def device_checks(gpus: Sequence[GPU], visible: Sequence[GPU], error: str) -> list[Check]:
    if not gpus:
        if "mismatch" in error.lower():
            return [
                Check("GPUs", Light.RED, error, "driver and library were updated apart: reboot, or reload the driver")
            ]
        found = f"none: {error}" if error else "none"
        advice = "training runs on CPU with gloo; devices, topology and NCCL cannot be judged here"
        return [Check("GPUs", Light.UNKNOWN, found, advice)]
    checks = [gpu_check(gpu) for gpu in visible]
    if len(visible) < len(gpus):
        checks.append(
            Check(
                "GPUs", Light.YELLOW, f"{len(visible)} of {len(gpus)} visible", "CUDA_VISIBLE_DEVICES hides the others"
            )
        )
    if len({gpu.name for gpu in visible}) > 1:
        checks.append(
            Check("GPUs", Light.YELLOW, "of different kinds", "every step waits for the slowest; choose equal ones")
        )
    return checks


def gpu_check(gpu: GPU) -> Check:
    capability = ".".join(map(str, gpu.compute_capability))
    found = f"{gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB, {gpu.used_bytes / GIB:.1f} in use, compute capability {capability}"
    name = f"GPU {gpu.index}"
    if gpu.mig:
        return Check(
            name,
            Light.YELLOW,
            f"{found}, MIG on",
            "instances cannot reach one another: one process per instance, no DDP over them",
        )
    if gpu.compute_capability < (8, 0):
        return Check(name, Light.YELLOW, found, "no bf16 products in hardware: train in 32-true")
    if gpu.used_bytes > BUSY_SHARE * gpu.memory_bytes:
        return Check(name, Light.YELLOW, found, "somebody else uses it: see `nvidia-smi`")
    return Check(name, Light.GREEN, found)


def topology_checks(matrix: str, peers: str, gpus: int) -> tuple[list[Check], Topology | None]:
    """Judges `nvidia-smi topo -m` and `topo -p2p r`; says so when either cannot be read."""
    topology = parse_topology(matrix)
    if topology is None:
        said = matrix.strip().splitlines()[0] if matrix.strip() else "no output"
        return [
            Check("topology", Light.UNKNOWN, f"nvidia-smi topo -m: {said}", "links between GPUs are not known")
        ], None
    checks = [topology_check(topology)]
    if gpus > 1:
        checks.append(peer_check(parse_peer_access(peers), topology))
    if topology.nics:
        nearest = ", ".join(f"{gpu} {'/'.join(topology.nearest_nics(gpu)) or 'none'}" for gpu in topology.gpus)
        checks.append(Check("NICs", Light.GREEN, f"nearest: {nearest}"))
    return checks, topology


def topology_check(topology: Topology) -> Check:
    found, worst = topology.describe(), topology.worst_path()
    if len(topology.gpus) == 1 or topology.fully_nvlinked:
        return Check("topology", Light.GREEN, found)
    if worst == "SYS":
        advice = "the farthest pair crosses sockets: prefer GPUs of one socket, accumulate more, no tensor parallelism"
        return Check("topology", Light.YELLOW, found, advice)
    return Check(
        "topology", Light.YELLOW, found, "PCIe between some: DDP with accumulation; no tensor parallelism over PCIe"
    )


def peer_check(peers: dict[tuple[str, str], str] | None, topology: Topology) -> Check:
    if peers is None:
        return Check("peer access", Light.UNKNOWN, "nvidia-smi topo -p2p r gave no matrix")
    refused = {word for word in peers.values() if word not in ("OK", "X")}
    if not refused:
        return Check("peer access", Light.GREEN, "every GPU reads every other directly")
    why = ", ".join(f"{word}: {PEER_MEANING.get(word, 'unknown')}" for word in sorted(refused))
    count = sum(word in refused for word in peers.values()) // 2
    light = Light.RED if topology.fully_nvlinked else Light.YELLOW
    advice = (
        "NVLink is there but refused: check fabric manager and driver"
        if light is Light.RED
        else "copies go through host memory: slower"
    )
    return Check("peer access", light, f"{count} pairs cannot ({why})", advice)
