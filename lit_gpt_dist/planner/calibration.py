"""This machine's measured rates, as a JSON file in the user's cache. Written by `doctor --measure`, read by `plan`.

Knows nothing of how they are measured.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.planner.compute import Rates
from lit_gpt_dist.planner.hardware import Link, known_device

FORMAT = 1
Curve = tuple[tuple[float, float], ...]  # (bytes, bus bandwidth), ascending


@dataclass(frozen=True)
class Calibration:
    """Measured rates of one kind of device. ``all_reduce`` and ``all_gather``: ranks → (bytes, bus bandwidth) points, ascending."""

    device: str  # as the driver prints it
    rates: Rates | None = None
    host_to_device: float | None = None  # bytes/s
    all_reduce: dict[int, Curve] = field(default_factory=dict)
    backend: str = ""  # that moved the collectives
    when: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    precision: str = "bf16"  # of the products measured; rates say nothing about another one
    all_gather: dict[int, Curve] = field(default_factory=dict)

    def rates_for(self, precision: str) -> Rates | None:
        """Rates for a Trainer precision, or None where others were measured."""
        return self.rates if (precision == "32-true") == (self.precision == "fp32") else None

    def link(self, ranks: int) -> Link | None:
        """The link as measured with as many ranks, or with the most ranks measured when there were fewer."""
        measured = [n for n in sorted(self.all_reduce) if n <= ranks]
        if not measured:
            return None
        curve, source = self.all_reduce[measured[-1]], f"measured, {self.backend}, {measured[-1]} ranks, {self.when}"
        return Link("measured", curve[-1][1], "measured", source, curve, self.all_gather.get(measured[-1], ()))


def cache_folder() -> Path:
    """LIT_GPT_DIST_CACHE, else lit_gpt_dist under XDG_CACHE_HOME, else under ~/.cache."""
    if own := os.environ.get("LIT_GPT_DIST_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_gpt_dist"


def calibration_path(device: str) -> Path:
    return cache_folder() / f"calibration-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def to_json(calibration: Calibration) -> dict[str, Any]:
    rates = calibration.rates
    return {
        "format": FORMAT,
        "device": calibration.device,
        "when": calibration.when,
        "versions": calibration.versions,
        "precision": calibration.precision,
        "rates": None
        if rates is None
        else {
            "matmul": [list(point) for point in rates.matmul],
            "attention_flops": rates.attention_flops,
            "copy_bandwidth": rates.copy_bandwidth,
            "launch_seconds": rates.launch_seconds,
            "kernel_seconds": rates.kernel_seconds,
        },
        "host_to_device": calibration.host_to_device,
        "backend": calibration.backend,
        "all_reduce": {str(n): [list(point) for point in curve] for n, curve in calibration.all_reduce.items()},
        "all_gather": {str(n): [list(point) for point in curve] for n, curve in calibration.all_gather.items()},
    }


def from_json(data: dict[str, Any], source: str) -> Calibration:
    """Raises UserError when the file is not a calibration of this format."""
    try:
        if data["format"] != FORMAT:
            raise UserError(
                f"{source} has calibration format {data['format']}, not {FORMAT}; run `lit-gpt-dist doctor --measure` again"
            )
        fields = data["rates"]
        rates = fields and Rates(**{**fields, "matmul": tuple((float(w), float(r)) for w, r in fields["matmul"])})
        curves, gathers = (
            {int(n): tuple((float(s), float(b)) for s, b in points) for n, points in measured.items()}
            for measured in (data["all_reduce"], data.get("all_gather", {}))  # the second is younger than the format
        )
        return Calibration(
            data["device"],
            rates,
            data["host_to_device"],
            curves,
            data["backend"],
            data["when"],
            data["versions"],
            data["precision"],
            gathers,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{source} is not a calibration ({error}); run `lit-gpt-dist doctor --measure` again"
        ) from error


def load(path: Path) -> Calibration:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); run `lit-gpt-dist doctor --measure` first"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); run `lit-gpt-dist doctor --measure` again") from error
    return from_json(data, str(path))


def save(calibration: Calibration, path: Path) -> None:
    """Writes beside the target and renames: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(to_json(calibration), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def find(device_key: str) -> Calibration | None:
    """The newest calibration in the cache for a device, by planner key or by driver name; None when there is none."""
    wanted = {device_key.lower(), known_device(device_key) or device_key.lower()}
    folder = cache_folder()
    if not folder.is_dir():
        return None
    newest_first = sorted(folder.glob("calibration-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first:
        calibration = load(path)
        if wanted & {calibration.device.lower(), known_device(calibration.device)}:
            return calibration
    return None
