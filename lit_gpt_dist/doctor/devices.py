"""Device facts from NVIDIA's management library. Imports no torch: asking takes milliseconds.

On a machine without the library's driver part there are no devices, and ``driver_error`` says why.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class GPU:
    """One device as the driver sees it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    compute_capability: tuple[int, int]
    bus_id: str
    uuid: str
    mig: bool  # cut into instances


@contextmanager
def management_library() -> Generator[Any, None, None]:
    """The initialised library. Raises its own NVMLError where there is no driver."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def read_gpu(nvml: Any, index: int) -> GPU:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:  # devices that cannot be cut into instances answer "not supported"
        mig = False
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    bus = text(nvml.nvmlDeviceGetPciInfo(handle).busId)
    name, uuid = text(nvml.nvmlDeviceGetName(handle)), text(nvml.nvmlDeviceGetUUID(handle))
    return GPU(index, name, memory.total, memory.used, tuple(capability), bus, uuid, mig)


def all_devices() -> tuple[list[GPU], str]:
    """Every device of the machine, and why there is none (empty when there is)."""
    try:
        with management_library() as nvml:
            return [read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())], ""
    except ImportError:
        return [], "nvidia-ml-py is not installed"
    except Exception as error:  # NVMLError has no stable base across versions of the library
        return [], str(error)


def is_visible(gpu: GPU, visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves a device to this process: indices or UUID prefixes, up to the first invalid."""
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",")]
    return any(name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)) for name in names)


def visible_devices() -> list[GPU]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [gpu for gpu in all_devices()[0] if is_visible(gpu, visible)]


def joined_by_nvlink() -> bool:
    """Whether every pair of this process's devices has NVLink between them; False where that is not known."""
    try:
        with management_library() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in visible_devices()]
            kind, joined = nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK
            states = [nvml.nvmlDeviceGetP2PStatus(one, other, kind) for one, other in combinations(handles, 2)]
            return bool(states) and all(state == joined for state in states)
    except Exception:  # no driver, no library, or a driver that does not say
        return False


def driver_version() -> tuple[str, int] | None:
    """The driver's version and the newest CUDA it supports (12040 for 12.4), or None without a driver."""
    try:
        with management_library() as nvml:
            return text(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
    except Exception:  # no driver, no library: both mean unknown
        return None
