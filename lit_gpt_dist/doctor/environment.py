"""Environment variables that change NCCL, CUDA or torch.distributed, and what each does. Reads a mapping; sets nothing."""

from collections.abc import Mapping

from lit_gpt_dist.doctor.check import Check, Light

# Values that slow a run down or take a path away; NCCL's user guide, "Environment Variables", and PyTorch's notes.
NCCL_EFFECTS: dict[str, tuple[Light, str]] = {
    "NCCL_P2P_DISABLE": (Light.YELLOW, "no direct copies between GPUs: everything goes through host memory"),
    "NCCL_P2P_LEVEL": (Light.GREEN, "limits how far apart GPUs may be for direct copies"),
    "NCCL_SHM_DISABLE": (Light.YELLOW, "no shared memory between processes: falls back to the network stack"),
    "NCCL_IB_DISABLE": (Light.YELLOW, "no InfiniBand or RoCE: nodes talk over TCP"),
    "NCCL_NET_GDR_LEVEL": (Light.GREEN, "limits how far a NIC may be from a GPU for direct access"),
    "NCCL_NVLS_ENABLE": (Light.GREEN, "NVLink multicast on (1) or off (0); left as it is"),
    "NCCL_ALGO": (Light.YELLOW, "forces an algorithm: NCCL's own choice by size is lost"),
    "NCCL_PROTO": (Light.YELLOW, "forces a protocol: a wrong one can even corrupt data (NCCL user guide)"),
    "NCCL_MAX_NCHANNELS": (Light.YELLOW, "caps the channels and so the bandwidth"),
    "NCCL_MIN_NCHANNELS": (Light.GREEN, "raises the channels: more bandwidth for less compute"),
    "NCCL_BUFFSIZE": (Light.GREEN, "size of NCCL's buffers per channel"),
    "NCCL_DEBUG": (Light.GREEN, "prints what NCCL does; TRACE slows it down"),
    "NCCL_DEBUG_SUBSYS": (Light.GREEN, "which parts NCCL_DEBUG prints"),
    "NCCL_SOCKET_IFNAME": (Light.GREEN, "network interfaces NCCL may use"),
    "NCCL_IB_HCA": (Light.GREEN, "InfiniBand adapters NCCL may use"),
    "NCCL_IB_GID_INDEX": (Light.GREEN, "address that RoCE uses"),
    "NCCL_CUMEM_ENABLE": (Light.GREEN, "how NCCL allocates device memory"),
    "NCCL_IGNORE_CPU_AFFINITY": (Light.GREEN, "NCCL threads ignore the CPUs the process is pinned to"),
    "NCCL_TOPO_FILE": (Light.YELLOW, "NCCL believes this file, not the machine"),
    "NCCL_GRAPH_FILE": (Light.YELLOW, "NCCL believes this file, not its own search"),
    "NCCL_TUNER_PLUGIN": (Light.GREEN, "a plug-in chooses algorithms"),
    "NCCL_NET": (Light.GREEN, "which network plug-in NCCL uses"),
    "NCCL_NET_PLUGIN": (Light.GREEN, "which network plug-in NCCL uses"),
    "NCCL_CROSS_NIC": (Light.GREEN, "whether a ring may use different NICs on different nodes"),
    "NCCL_NTHREADS": (Light.YELLOW, "threads per block: NCCL's own choice is lost"),
    "NCCL_LAUNCH_MODE": (Light.YELLOW, "how kernels are launched: NCCL's own choice is lost"),
}
OFF = ("", "0", "false", "n", "no")
CUDA_EFFECTS: dict[str, tuple[Light, str]] = {
    "CUDA_LAUNCH_BLOCKING": (Light.RED, "every kernel waits for the one before: for finding errors only; unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": (Light.YELLOW, "collectives block the host: overlap is lost; unset it"),
    "TORCH_DISTRIBUTED_DEBUG": (Light.YELLOW, "DETAIL checks every collective and is slow; unset it for real runs"),
    "NVIDIA_TF32_OVERRIDE": (Light.YELLOW, "0 forbids TF32 whatever the program says; unset it"),
}


def environment_checks(environment: Mapping[str, str]) -> list[Check]:
    """A line for each variable that changes NCCL or CUDA; one line when there is none."""
    checks = []
    for name in sorted(environment):
        value = environment[name]
        if name in NCCL_EFFECTS:
            checks.append(nccl_check(name, value))
        elif name.startswith("NCCL_"):
            checks.append(Check(name, Light.YELLOW, value, "not a variable this doctor knows: check its spelling"))
        elif name in CUDA_EFFECTS and value.strip().lower() not in (*OFF, "off"):
            light, effect = CUDA_EFFECTS[name]
            checks.append(Check(name, light, value, effect))
    return checks or [Check("environment", Light.GREEN, "no variable changes NCCL or CUDA")]


def nccl_check(name: str, value: str) -> Check:
    light, effect = NCCL_EFFECTS[name]
    if name.endswith("_DISABLE") and value.strip().lower() in OFF:
        return Check(name, Light.GREEN, value, "")
    return Check(
        name, light, value, effect if light is Light.GREEN else f"{effect}; unset it unless you know why it is there"
    )
