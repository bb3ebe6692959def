"""`lit-gpt-dist doctor`: looks at the machine, and with --measure times it. torch is imported for measuring only."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.doctor import devices, gpus, machine, versions
from lit_gpt_dist.doctor.check import Check, Light
from lit_gpt_dist.doctor.environment import environment_checks
from lit_gpt_dist.doctor.render import checks_table, print_measured
from lit_gpt_dist.errors import EXIT_FAILURE, EXIT_OK, UserError

if TYPE_CHECKING:  # torch only where something is measured
    from lit_gpt_dist.doctor.measure import Measured

WIDE = 150


def parser() -> ToolParser:
    options = ToolParser(
        prog="lit-gpt-dist doctor",
        description="What this machine is and what will not work on it. Exit code 1 when a light is red.",
    )
    options.add_argument(
        "--folder", type=Path, default=Path("."), help="where checkpoints will go: its speed is checked"
    )
    options.add_argument("--json", action="store_true", help="findings, and measurements, as JSON")
    measuring = options.add_argument_group("measuring")
    measuring.add_argument("--measure", action="store_true", help="time this machine and store it for `plan`")
    measuring.add_argument("--ranks", type=int, help="processes of the collectives; by default all GPUs, without any 2")
    measuring.add_argument(
        "--backend", nargs="+", choices=("nccl", "gloo"), help="by default nccl where each rank has a GPU"
    )
    measuring.add_argument("--sizes", type=float, nargs="+", help="bytes of the larger buffer")
    measuring.add_argument("--only_collectives", action="store_true", help="leave out the rates of one device")
    measuring.add_argument("--calibration", type=Path, help="file to store in, instead of the user's cache")
    measuring.add_argument("--output", type=Path, help="all measurements as JSON")
    measuring.add_argument("--plot", type=Path, help="bandwidths as a PNG; by default beside the calibration")
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    return measure(console, options) if options.measure else look(console, options)


def look(console: Console, options: argparse.Namespace) -> int:
    checks = all_checks(options.folder)
    if options.json:
        print(
            json.dumps(
                [{"name": c.name, "light": c.light.name.lower(), "found": c.found, "advice": c.advice} for c in checks],
                indent=1,
            )
        )
    else:
        console.print(checks_table(checks))
        if not any(check.name.startswith("GPU ") for check in checks):
            console.print("No GPU answered: device memory, links, NCCL and MFU cannot be known here.", highlight=False)
    return EXIT_FAILURE if any(check.light is Light.RED for check in checks) else EXIT_OK


def all_checks(folder: Path) -> list[Check]:
    every, error = devices.all_devices()
    visible = [gpu for gpu in every if devices.is_visible(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))]
    checks = gpus.device_checks(every, visible, error)
    topology = None
    if every:
        found, topology = gpus.topology_checks(
            gpus.nvidia_smi("topo", "-m"), gpus.nvidia_smi("topo", "-p2p", "r"), len(every)
        )
        checks += found
    checks += versions.version_checks(versions.installed(), devices.driver_version() if every else None, len(every))
    checks.append(machine.pinning_check(topology, os.sched_getaffinity(0), machine.count_numa_nodes()))
    if not every:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        checks.append(machine.load_check(os.getloadavg()[0], len(os.sched_getaffinity(0)), threads))
    checks.append(machine.shared_memory_check())
    checks.append(machine.port_check(dict(os.environ)))
    checks.append(machine.loopback_check())
    checks.append(machine.file_system_check(folder))
    return checks + environment_checks(os.environ)


def measure(console: Console, options: argparse.Namespace) -> int:
    import torch

    from lit_gpt_dist.doctor import measure as measuring
    from lit_gpt_dist.doctor.launch import is_first_rank, under_torchrun
    from lit_gpt_dist.planner.calibration import cache_folder

    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.ranks
    ranks = torch.cuda.device_count() or 2 if ranks is None else ranks
    if ranks < 1:
        raise UserError(f"ranks is {ranks}, but must be at least 1")
    sizes = [int(size) for size in options.sizes] if options.sizes else None
    if sizes and min(sizes) < 1:
        raise UserError(f"size {min(sizes)} is not a number of bytes above 0; give --sizes like 1e6 25e6")
    backends = measuring.choose_backends(options.backend, ranks)
    previous = measuring.previous_calibration(options.calibration)
    found = measuring.measure(ranks, backends, sizes, not options.only_collectives, previous)
    stored = measuring.store(found, options.calibration)
    if not is_first_rank():
        return EXIT_OK
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(measuring.as_json(found), indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(measuring.as_json(found), indent=1))
    else:
        print_measured(console, found)
        console.print(f"stored for `plan` in {stored}", highlight=False, markup=False, soft_wrap=True)
    if found.timings:
        line = picture_line(found, options.plot or cache_folder() / "bandwidth.png")
        if not options.json:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return EXIT_OK


def picture_line(found: "Measured", path: Path) -> str:
    """Draws the sweep and says where; a machine without matplotlib keeps its figures all the same."""
    from lit_gpt_dist.doctor.picture import draw

    try:
        draw(found.timings, path)
    except ImportError as error:
        return f"no picture: {error}"
    return f"picture in {path}"
