"""Datasheet facts of devices and links, with their sources. What is not listed is unknown and stays so.

Knows nothing of the machine it runs on: ``lit_gpt_dist.doctor`` finds that out.
"""

import re
from dataclasses import dataclass, replace

from lit_gpt_dist.errors import UserError

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Device:
    """One accelerator. ``None``: not known."""

    name: str
    memory_bytes: float | None = None
    peak_flops: float | None = None  # dense bf16, tensor cores
    memory_bandwidth: float | None = None  # bytes/s
    nvlink_bandwidth: float | None = None  # bytes/s in one direction, all links of a card; None: no NVLink
    workspace_bytes: float = 8 * MIB  # cuBLAS, one stream: ":4096:2:16:8" (PyTorch documentation, CUDA semantics)


HOPPER_WORKSPACE = 32 * MIB  # cuBLAS documentation: 32 MiB recommended on Hopper and later, which PyTorch allocates
_GB, _TF = 1e9, 1e12
# Memory: what CUDA leaves to programs, a little under the label; `--device auto` and --memory_gib replace it.
# Peaks: NVIDIA datasheets, dense (half of the figure "with sparsity"); of GeForce cards with fp32 accumulation. Lightning's table gives H200 1979 (with sparsity)
# and RTX 4090 82.6 (no tensor cores) for bf16: not used here.
DEVICES: dict[str, Device] = {
    "b200": Device("B200", 179.0 * GIB, 2250 * _TF, 8000 * _GB, 900 * _GB, HOPPER_WORKSPACE),
    "h200": Device("H200", 139.8 * GIB, 989 * _TF, 4800 * _GB, 450 * _GB, HOPPER_WORKSPACE),
    "h100": Device("H100 SXM", 79.1 * GIB, 989 * _TF, 3350 * _GB, 450 * _GB, HOPPER_WORKSPACE),
    "h100-nvl": Device("H100 NVL", 93.6 * GIB, 835 * _TF, 3938 * _GB, 300 * _GB, HOPPER_WORKSPACE),
    "h100-pcie": Device("H100 PCIe", 79.6 * GIB, 756 * _TF, 2039 * _GB, None, HOPPER_WORKSPACE),
    "a100": Device("A100 80GB", 79.3 * GIB, 312 * _TF, 2039 * _GB, 300 * _GB),
    "a100-40gb": Device("A100 40GB", 39.6 * GIB, 312 * _TF, 1555 * _GB, 300 * _GB),
    "l40s": Device("L40S", 44.5 * GIB, 362 * _TF, 864 * _GB),
    "l4": Device("L4", 22.5 * GIB, 121 * _TF, 300 * _GB),
    "a40": Device("A40", 45.0 * GIB, 149.7 * _TF, 696 * _GB),
    "a10": Device("A10", 22.5 * GIB, 125 * _TF, 600 * _GB),
    "a6000": Device("RTX A6000", 48.0 * GIB, 154.8 * _TF, 768 * _GB),
    "rtx5090": Device("RTX 5090", 31.8 * GIB, 209.5 * _TF, 1792 * _GB, None, HOPPER_WORKSPACE),
    "rtx4090": Device("RTX 4090", 23.6 * GIB, 165 * _TF, 1008 * _GB),
    "rtx4080": Device("RTX 4080", 15.7 * GIB, 97.5 * _TF, 717 * _GB),
    "rtx3090": Device("RTX 3090", 24.0 * GIB, 71 * _TF, 936 * _GB),
}
# Words by which a driver's device name is recognised, most specific first.
_NAMES = (
    (("b200",), "b200"),
    (("h200",), "h200"),
    (("h100", "hbm3"), "h100"),  # "NVIDIA H100 80GB HBM3" is the SXM board; PCIe and NVL boards have other peaks
    (("h100", "nvl"), "h100-nvl"),
    (("h100", "pcie"), "h100-pcie"),
    (("a100", "40gb"), "a100-40gb"),
    (("a100", "80gb"), "a100"),
    (("l40s",), "l40s"),
    (("l4",), "l4"),
    (("a40",), "a40"),
    (("a10",), "a10"),
    (("rtx a6000",), "a6000"),
    (("rtx 5090",), "rtx5090"),
    (("rtx 4090",), "rtx4090"),
    (("rtx 4080",), "rtx4080"),
    (("rtx 3090",), "rtx3090"),
)
# slower, or parts of a card: their peaks are others
_VARIANTS = ("laptop", "super", "ti", "rtx 4090 d", "rtx 5090 d", "a100x", "h200 nvl", "max q", "mig")


def known_device(driver_name: str) -> str | None:
    """The key in ``DEVICES`` for a name as the driver prints it, or None."""
    name = f" {re.sub(r'[^a-z0-9]+', ' ', driver_name.lower())} "

    def says(word: str) -> bool:  # as a whole word: an L40 is no L4
        return f" {word} " in name

    if any(map(says, _VARIANTS)):
        return None
    return next((key for words, key in _NAMES if all(map(says, words))), None)


def device_by_name(name: str, memory_gib: float | None = None) -> Device:
    """A device by key or driver name. One that is not known has no peak, and memory only if ``memory_gib`` says it."""
    key = name.lower().replace(" ", "").replace("_", "")
    found = DEVICES.get(key) or DEVICES.get(known_device(name) or "") or Device(name)
    return replace(found, memory_bytes=memory_gib * GIB) if memory_gib else found


@dataclass(frozen=True)
class Link:
    """What joins cards. ``curve`` holds measured (bytes, bus bandwidth) points of all-reduces, ascending; else one ``bandwidth``.
    ``gathers``: such points of all-gathers, which are slower than their half of an all-reduce."""

    name: str
    bandwidth: float | None  # bytes/s of bus bandwidth
    kind: str  # nvlink, pcie, given, unknown
    source: str
    curve: tuple[tuple[float, float], ...] = ()
    gathers: tuple[tuple[float, float], ...] = ()

    @property
    def is_fast(self) -> bool:
        """NVLink, by its name or by being faster than any PCIe."""
        return self.kind == "nvlink" or (self.bandwidth or 0.0) > PCIE_BANDWIDTH["pcie5"]

    def bandwidth_at(self, message_bytes: float) -> float | None:
        """Bus bandwidth for messages of a size: between measured points straight in size, beyond them the end's."""
        return _on_curve(self.curve, message_bytes) if self.curve else self.bandwidth

    def gather_bandwidth_at(self, message_bytes: float) -> float | None:
        """The same of an all-gather or a reduce-scatter."""
        return _on_curve(self.gathers, message_bytes) if self.gathers else self.bandwidth_at(message_bytes)


def _on_curve(curve: tuple[tuple[float, float], ...], message_bytes: float) -> float:
    below = [point for point in curve if point[0] <= message_bytes]
    above = [point for point in curve if point[0] > message_bytes]
    if not below or not above:
        return (below or above)[-1 if below else 0][1]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 + (y1 - y0) * (message_bytes - x0) / (x1 - x0)


UNKNOWN_LINK = Link("unknown", None, "unknown", "not given")

# One direction of 16 lanes after 128b/130b coding (PCI-SIG): 8, 16 and 32 GT/s.
PCIE_BANDWIDTH = {"pcie3": 15.75 * _GB, "pcie4": 31.5 * _GB, "pcie5": 63.0 * _GB}


def link_by_name(name: str, device: Device) -> Link:
    """``nvlink``, ``pcie3|4|5`` (x16), or a number of GB/s of bus bandwidth.

    Raises:
        UserError: none of these, or NVLink on a device that has none or is not known.
    """
    if name in PCIE_BANDWIDTH:
        return Link(name, PCIE_BANDWIDTH[name], "pcie", "PCI-SIG, x16, one direction: an upper bound")
    if name == "nvlink":
        if device.nvlink_bandwidth is None:
            raise UserError(
                f"link nvlink is not known for {device.name}; give a link of pcie4, pcie5, or a number of GB/s"
            )
        return Link(name, device.nvlink_bandwidth, "nvlink", "datasheet, one direction: an upper bound")
    try:
        rate = float(name)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UserError(
            f"link {name!r} is not nvlink, pcie3, pcie4, pcie5 or a positive number of GB/s; use one of these"
        )
    return Link(f"{rate:g} GB/s", rate * _GB, "given", "as given")
