"""Versions that must agree: driver, CUDA of torch, NCCL packages, Lightning. Reads package metadata; imports none of them."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from lit_gpt_dist.doctor.check import Check, Light


@dataclass(frozen=True)
class Versions:
    """What is installed; None where it is not, or not known."""

    torch: str | None
    torch_cuda: str | None  # the CUDA that torch was built for; None: a CPU build
    lightning: str | None
    torchmetrics: str | None
    nccl: dict[str, str]  # package → version


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda_version() -> str | None:
    """From torch/version.py as text: importing torch takes a second."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / "version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    match = re.search(r"^cuda(?:: [^=]+)? = ['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def installed() -> Versions:
    nccl = {name: version for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if (version := version_of(name))}
    return Versions(
        version_of("torch"), torch_cuda_version(), version_of("lightning"), version_of("torchmetrics"), nccl
    )


def cuda_number(version: str) -> int:
    """12040 for 12.4, as the driver counts."""
    major, _, minor = version.partition(".")
    return int(major) * 1000 + int(minor.split(".")[0] or 0) * 10


def version_checks(found: Versions, driver: tuple[str, int] | None, gpus: int) -> list[Check]:
    checks = [Check("torch", Light.GREEN, f"{found.torch}, CUDA {found.torch_cuda or 'none (CPU build)'}")]
    if found.torch is None:
        checks = [Check("torch", Light.RED, "not installed", "pip install torch")]
    elif gpus and found.torch_cuda is None:
        checks = [
            Check(
                "torch", Light.RED, f"{found.torch} is a CPU build, but there are {gpus} GPUs", "install torch for CUDA"
            )
        ]
    if found.lightning is None:
        checks.append(Check("lightning", Light.RED, "not installed", "pip install lightning"))
    else:
        checks.append(Check("lightning", Light.GREEN, f"{found.lightning}, torchmetrics {found.torchmetrics}"))
    if driver is not None:
        checks.append(driver_check(found, driver))
    if len(found.nccl) > 1:
        names = ", ".join(f"{name} {version}" for name, version in found.nccl.items())
        checks.append(
            Check("NCCL", Light.YELLOW, names, "two NCCL packages: uninstall the one torch was not built for")
        )
    elif found.nccl:
        checks.append(
            Check("NCCL", Light.GREEN, ", ".join(f"{name} {version}" for name, version in found.nccl.items()))
        )
    return checks


def driver_check(found: Versions, driver: tuple[str, int]) -> Check:
    """A driver runs programs built for an older minor of its major CUDA version, never for a newer major one."""
    name, supported = driver
    text = f"{name}, supports CUDA {supported // 1000}.{supported % 1000 // 10}"
    if found.torch_cuda is None:
        return Check("driver", Light.GREEN, text)
    wanted = cuda_number(found.torch_cuda)
    if wanted // 1000 > supported // 1000:
        return Check(
            "driver",
            Light.RED,
            f"{text}; torch wants {found.torch_cuda}",
            "update the driver, or install torch for an older CUDA",
        )
    if wanted > supported:
        return Check(
            "driver",
            Light.YELLOW,
            f"{text}; torch wants {found.torch_cuda}",
            "works by minor-version compatibility; update the driver",
        )
    return Check("driver", Light.GREEN, text)
