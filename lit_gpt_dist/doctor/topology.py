"""Reads `nvidia-smi topo -m`, `topo -p2p r` and `nvidia-smi -L`. Text in, facts out; runs nothing.

NVIDIA's words for a path, best first: X self; NV# a bond of # NVLinks; PIX at most one PCIe bridge; PXB several; PHB a
host bridge, so through the CPU; NODE between host bridges of one NUMA node; SYS between NUMA nodes. Drivers of 2017 say
SOC for SYS.
"""

import re
from dataclasses import dataclass
from itertools import combinations

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
GPU = re.compile(r"GPU\d+")
DEVICE = re.compile(r"(GPU|NIC)\d+|\w*(mlx|ib|bnxt|irdma|efa|roce|rdma)\w*", re.IGNORECASE)
WORD = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
CPUS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
PEER_WORD = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U|N/A")
PEER_MEANING = {
    "OK": "works",
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "this topology does not support it",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}
COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # without NVLink, best first


@dataclass(frozen=True)
class Topology:
    """Devices, the word for each ordered pair, and what CPUs and NUMA node each GPU is near (None: not reported)."""

    devices: tuple[str, ...]
    words: dict[tuple[str, str], str]
    cpus: dict[str, str | None]
    numa: dict[str, str | None]
    nic_names: dict[str, str]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(name for name in self.devices if GPU.fullmatch(name))

    @property
    def nics(self) -> tuple[str, ...]:
        return tuple(name for name in self.devices if not GPU.fullmatch(name))

    def pairs(self) -> dict[tuple[str, str], str]:
        """The word of each unordered pair of GPUs; ``?`` where the text had none that is known."""
        return {pair: self.words.get(pair, "?") for pair in combinations(self.gpus, 2)}

    @property
    def numa_nodes(self) -> tuple[str, ...]:
        return tuple(sorted({node for node in self.numa.values() if node is not None}))

    def nvlinks(self) -> dict[tuple[str, str], int]:
        """Links in the bond of each pair that has one."""
        return {pair: int(word[2:]) for pair, word in self.pairs().items() if word.startswith("NV")}

    @property
    def fully_nvlinked(self) -> bool:
        return bool(self.pairs()) and len(self.nvlinks()) == len(self.pairs())

    def worst_path(self) -> str | None:
        """The farthest PCIe word between two GPUs, or None when NVLink joins all of them or there is one."""
        found = [word for word in self.pairs().values() if word in PATHS]
        return max(found, key=PATHS.index) if found else None

    def nearest_nics(self, gpu: str) -> tuple[str, ...]:
        """NICs with the shortest path to a GPU, by their own names where the text gives them."""
        near = {nic: PATHS.index(word) for nic in self.nics if (word := self.words.get((gpu, nic))) in PATHS}
        best = min(near.values(), default=None)
        return tuple(self.nic_names.get(nic, nic) for nic, distance in near.items() if distance == best)

    def describe(self) -> str:
        """One sentence."""
        if len(self.gpus) == 1:
            return "a single GPU: nothing to join"
        links = self.nvlinks()
        if self.fully_nvlinked:
            counts = sorted(set(links.values()))
            return f"{len(self.gpus)} GPUs, each pair by NVLink (NV{'/NV'.join(map(str, counts))})"
        worst = self.worst_path() or "unknown"
        if links:
            return (
                f"{len(self.gpus)} GPUs, {len(links)} of {len(self.pairs())} pairs by NVLink, the others up to {worst}"
            )
        return f"{len(self.gpus)} GPUs over PCIe, the farthest pair {worst}"


def clean_lines(text: str) -> list[str]:
    return [ANSI.sub("", line).rstrip() for line in text.splitlines()]


def header_devices(line: str) -> list[str]:
    """Device names of a header line, or nothing when the line is none: a row has a path word in second place."""
    tokens = line.split()
    if not tokens or not GPU.fullmatch(tokens[0]) or (len(tokens) > 1 and WORD.fullmatch(tokens[1])):
        return []
    names = []
    for token in tokens:
        if not DEVICE.fullmatch(token):
            break
        names.append(token)
    return names


def parse_topology(text: str) -> Topology | None:
    """The matrix in ``text``, or None when there is none (an error message, an empty output)."""
    lines = clean_lines(text)
    start = next((number for number, line in enumerate(lines) if header_devices(line)), None)
    if start is None:
        return None
    devices = header_devices(lines[start])
    columns = [name for name in COLUMNS if name in lines[start]]
    words: dict[tuple[str, str], str] = {}
    cpus: dict[str, str | None] = {}
    numa: dict[str, str | None] = {}
    for line in lines[start + 1 :]:
        tokens = line.split()
        if not tokens or tokens[0] not in devices:
            continue
        row = tokens[1 : 1 + len(devices)]
        words |= {(tokens[0], other): word for other, word in zip(devices, row, strict=False) if WORD.fullmatch(word)}
        if GPU.fullmatch(tokens[0]):
            cpus[tokens[0]], numa[tokens[0]] = affinity(tokens[1 + len(devices) :], columns)
    if not words:
        return None
    words = {pair: "SYS" if word == "SOC" else word for pair, word in words.items()}
    return Topology(tuple(devices), words, cpus, numa, nic_legend(lines))


def affinity(fields: list[str], columns: list[str]) -> tuple[str | None, str | None]:
    """CPU list and NUMA node from what follows the matrix. Columns may be empty, so fields are told by their form."""
    cpus = next((field for field in fields if CPUS.fullmatch(field)), None)
    if cpus is None:
        return None, None  # without CPUs a lone number or N/A cannot be told from the GPU's own NUMA id
    after = fields[fields.index(cpus) + 1 :]
    node = after[0] if after and "NUMA Affinity" in columns and CPUS.fullmatch(after[0]) else None
    return cpus, node


def nic_legend(lines: list[str]) -> dict[str, str]:
    """NIC0: mlx5_0 and so on."""
    return dict(match.groups() for line in lines if (match := re.fullmatch(r"\s*(NIC\d+):\s*(\S+)", line)))  # type: ignore[misc]


def parse_peer_access(text: str) -> dict[tuple[str, str], str] | None:
    """The word of each ordered pair of GPUs in `nvidia-smi topo -p2p r`, or None when there is no matrix."""
    lines = [line.split() for line in clean_lines(text)]
    header = next((tokens for tokens in lines if tokens and all(GPU.fullmatch(token) for token in tokens)), None)
    if header is None:
        return None
    found: dict[tuple[str, str], str] = {}
    for tokens in lines:
        if tokens and tokens[0] in header and len(tokens) > 1 and PEER_WORD.fullmatch(tokens[1]):
            found |= {
                (tokens[0], other): word for other, word in zip(header, tokens[1:], strict=False) if other != tokens[0]
            }
    return found or None


def parse_device_list(text: str) -> dict[str, list[str]]:
    """GPU → its MIG instances (profile names) from `nvidia-smi -L`; a GPU that is not cut has none."""
    found: dict[str, list[str]] = {}
    for line in clean_lines(text):
        if match := re.match(r"GPU (\d+):", line):
            found[f"GPU{match[1]}"] = []
        elif (match := re.match(r"\s+MIG (\S+)\s+Device", line)) and found:
            found[list(found)[-1]].append(match[1])
    return found
