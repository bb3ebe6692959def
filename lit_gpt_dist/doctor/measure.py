"""`doctor --measure`: runs the measurements, merges them into the calibration, and puts them into JSON."""

import dataclasses
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lit_gpt_dist.doctor.collectives import Sweep, Timing
from lit_gpt_dist.doctor.launch import is_first_rank, run_sweeps, under_torchrun
from lit_gpt_dist.doctor.rates import host_to_device_bandwidth, measure_rates, square_product_rate
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.planner import calibration as calibrations
from lit_gpt_dist.planner.calibration import Calibration

# The sizes of the yardstick (1, 25, 100, 400 MB, 1.6 GB), with some between; gloo copies through the host.
SIZES = {"nccl": [1_000_000, 4_000_000, 25_000_000, 100_000_000, 400_000_000, 1_600_000_000],
         "gloo": [10_000, 100_000, 1_000_000, 10_000_000, 40_000_000]}  # fmt: skip
SQUARE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Measured:
    """All that one run measured."""

    calibration: Calibration
    square_flops: float | None
    sweeps: tuple[Sweep, ...]

    @property
    def timings(self) -> list[Timing]:
        return [timing for sweep in self.sweeps for timing in sweep.timings]


def this_device() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def choose_backends(asked: list[str] | None, ranks: int) -> list[str]:
    """What was asked for, or NCCL where every rank has a GPU, else gloo.

    Raises:
        UserError: NCCL without enough GPUs.
    """
    gpus = torch.cuda.device_count()
    if asked and "nccl" in asked and gpus < ranks:
        raise UserError(
            f"backend nccl needs a GPU per rank, but {ranks} ranks share {gpus}; use --backend gloo or fewer --ranks"
        )
    return asked or (["nccl"] if gpus >= ranks else ["gloo"])


def measure(
    ranks: int, backends: list[str], sizes: list[int] | None, with_rates: bool, previous: Calibration | None
) -> Measured:
    """Rates of one device, then sweeps over ranks (none for a single one). ``previous``: what stays where nothing new is.

    Under torchrun every rank calls this; rates are then measured by none, since the ranks would disturb one another.
    """
    device = this_device()
    alone = with_rates and not under_torchrun()
    rates = measure_rates(device) if alone else getattr(previous, "rates", None)
    host = host_to_device_bandwidth(device) if alone else getattr(previous, "host_to_device", None)
    square = square_product_rate(SQUARE[device.type], device) if alone else None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # ranks of the sweep share the first device with this process
    sweeps = run_sweeps({name: sizes or SIZES[name] for name in backends}, ranks) if ranks > 1 else []
    curves = dict(previous.all_reduce) if previous else {}
    gathers = dict(previous.all_gather) if previous else {}
    backend = previous.backend if previous else ""
    for sweep in sweeps:
        if sweep.timings[0].backend == native_backend(device):
            curves |= bandwidth_curve(sweep, "all_reduce")
            gathers |= bandwidth_curve(sweep, "all_gather")
            backend = sweep.timings[0].backend
    calibration = Calibration(
        device_name(device),
        rates,
        host,
        curves,
        backend,
        datetime.now(UTC).isoformat(timespec="minutes"),
        {"torch": torch.__version__, "cuda": torch.version.cuda or "none"},
        "bf16" if device.type == "cuda" else "fp32",
        gathers,
    )
    return Measured(calibration, square, tuple(sweeps))


def native_backend(device: torch.device) -> str:
    """The backend whose figures are worth planning with: gloo on a GPU machine is not."""
    return "nccl" if device.type == "cuda" else "gloo"


def bandwidth_curve(sweep: Sweep, collective: str) -> dict[int, tuple[tuple[float, float], ...]]:
    """Ranks → (bytes, bus bandwidth) points of one collective; empty where it was not measured."""
    found = [timing for timing in sweep.timings if timing.collective == collective and timing.busbw]
    points = tuple(sorted((float(timing.size_bytes), timing.busbw or 0.0) for timing in found))
    return {found[0].ranks: points} if found else {}


def store(measured: Measured, path: Path | None) -> Path | None:
    """Writes the calibration on the first rank; returns where."""
    if not is_first_rank():
        return None
    target = path or calibrations.calibration_path(measured.calibration.device)
    calibrations.save(measured.calibration, target)
    return target


def previous_calibration(path: Path | None) -> Calibration | None:
    target = path or calibrations.calibration_path(device_name(this_device()))
    return calibrations.load(target) if target.exists() else None


def as_json(measured: Measured) -> dict[str, Any]:
    def described(timing: Timing) -> dict[str, Any]:
        return dataclasses.asdict(timing) | {"algbw": timing.algbw, "busbw": timing.busbw}

    return {
        "calibration": calibrations.to_json(measured.calibration),
        "square_flops": measured.square_flops,
        "collectives": [described(timing) for timing in measured.timings],
        "all_reduce_is_reduce_scatter_and_all_gather": [
            dataclasses.asdict(sweep.identity) for sweep in measured.sweeps
        ],
    }
