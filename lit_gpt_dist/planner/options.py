"""The options of `plan`, and the job they describe. Reads the calibration cache and, for `--device auto`, the devices."""

import argparse
import difflib
import math
import platform
from pathlib import Path
from typing import get_args

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import PRESETS, Recompute, preset
from lit_gpt_dist.planner import calibration as calibrations
from lit_gpt_dist.planner.calibration import Calibration
from lit_gpt_dist.planner.explain import FIGURES
from lit_gpt_dist.planner.hardware import DEVICES, GIB, UNKNOWN_LINK, Device, Link, device_by_name, link_by_name
from lit_gpt_dist.planner.job import ASSUMED_MFU, RESERVE_GIB, Job
from lit_gpt_dist.planner.layout import STRATEGIES
from lit_gpt_dist.planner.memory import MOMENTS

# Adam moves a weight by about the learning rate at each step (Kingma and Ba 2015, section 2.1): 1 is far beyond any use.
LARGEST_LEARNING_RATE = {"sgd": 100.0, "adamw": 1.0, "adam8bit": 1.0}
SHAPE_OPTIONS = {
    "context": int,
    "vocab_size": int,
    "layers": int,
    "heads": int,
    "kv_heads": int,
    "width": int,
    "ff_width": int,
    "dropout": float,
}
SHAPE_CHOICES = {"norm": ("layernorm", "rmsnorm"), "positions": ("learned", "rope"), "activation": ("gelu", "swiglu")}
SHAPE_FLAGS = ("tied", "bias")


def truth(word: str) -> bool:
    if word.lower() not in ("true", "false", "on", "off"):
        raise argparse.ArgumentTypeError(f"{word!r} is not one of true, false, on, off")
    return word.lower() in ("true", "on")


def parser() -> ToolParser:
    options = ToolParser(
        prog="lit-gpt-dist plan", description="Memory, communication, time and advice before paying for them."
    )
    model = options.add_argument_group("model")
    model.add_argument("--model.size", default="gpt2-124m", choices=list(PRESETS), help="preset")
    for name, kind in SHAPE_OPTIONS.items():
        model.add_argument(f"--model.{name}", type=kind, help="instead of the preset's")
    for name, choices in SHAPE_CHOICES.items():
        model.add_argument(f"--model.{name}", choices=choices, help="instead of the preset's")
    for name in SHAPE_FLAGS:
        model.add_argument(f"--model.{name}", type=truth, help="instead of the preset's")
    add_machine(options)
    add_training(options)
    more = options.add_argument_group("questions")
    more.add_argument("--task", choices=("train", "inference"), default="train", help="what to plan")
    more.add_argument("--batch", type=int, default=1, help="inference: sequences at once")
    more.add_argument("--bits", type=int, choices=(32, 16, 8, 4), help="inference: only these weights")
    more.add_argument("--tokens", type=float, help="days and card-hours for so many")
    more.add_argument(
        "--mtbf_hours", type=float, help="mean time between failures of one node: best checkpoint interval"
    )
    more.add_argument("--checkpoint_seconds", type=float, default=120.0, help="what saving one costs, for the interval")
    more.add_argument("--base_lr", type=float, help="learning rate known to be good at --base_batch")
    more.add_argument("--base_batch", type=int, help="global batch of --base_lr")
    more.add_argument("--strategy", choices=STRATEGIES, help="this one, with the arithmetic of every figure")
    more.add_argument("--explain", metavar="FIGURE", help=f"arithmetic of one figure: {', '.join(FIGURES)}")
    more.add_argument("--compare", type=Path, metavar="RESULTS", help="predictions beside a results.jsonl")
    more.add_argument("--json", action="store_true", help="the figures as JSON")
    return options


def add_machine(options: ToolParser) -> None:
    machine = options.add_argument_group("machine")
    machine.add_argument(
        "--device", default="auto", help=f"auto, {', '.join(DEVICES)}, or a name as the driver prints it"
    )
    machine.add_argument("--memory_gib", type=float, help="memory of one device, where it is not known")
    machine.add_argument("--devices", type=int, help="per node; by default those found, else 1")
    machine.add_argument("--nodes", type=int, default=1)
    machine.add_argument("--link", help="inside a node: nvlink, pcie3, pcie4, pcie5, or GB/s of bus bandwidth")
    machine.add_argument("--node_link", help="between nodes: GB/s of bus bandwidth")
    machine.add_argument(
        "--reserve_gib", type=float, default=RESERVE_GIB, help="of a device, for the CUDA context and NCCL"
    )
    machine.add_argument(
        "--calibration", type=Path, help="file of `doctor --measure`; by default the cache's, if it matches"
    )
    machine.add_argument(
        "--no_calibration", action="store_true", help="datasheet and assumed MFU, whatever the cache holds"
    )


def add_training(options: ToolParser) -> None:
    training = options.add_argument_group("training")
    training.add_argument(
        "--global_batch", type=int, help="windows per optimizer step; by default micro batch × devices"
    )
    training.add_argument("--micro_batch", type=int, default=16, help="windows per device per forward")
    training.add_argument("--precision", choices=("bf16-mixed", "32-true", "bf16-true"), default="bf16-mixed")
    training.add_argument(
        "--autocast", type=truth, default=False, help="16 bits in products only, as in other loops: on or off"
    )
    training.add_argument("--optimizer", choices=list(MOMENTS), default="adamw", help="sgd is SGD with momentum")
    training.add_argument("--recompute", choices=get_args(Recompute), default="none")
    training.add_argument("--recompute_blocks", type=int, help="of how many blocks, the first; by default all")
    training.add_argument("--flash", type=truth, default=True, help="fused attention: on or off")
    training.add_argument(
        "--execution",
        choices=("eager", "compiled", "graph"),
        default="graph",
        help="graph: compiled and in a CUDA graph, what fit does on a GPU by default",
    )
    training.add_argument("--overlap", type=truth, default=True, help="communication behind backward: on or off")
    training.add_argument(
        "--units",
        choices=("auto", "blocks", "model"),
        default="auto",
        help="what fsdp2 gathers at a time; auto: as fit decides",
    )
    training.add_argument("--no_sync", type=truth, default=True, help="reduce once per step: on or off")
    training.add_argument("--mfu", type=float, default=ASSUMED_MFU, help="assumed where no calibration matches")


def machine_of(options: argparse.Namespace) -> tuple[Device, int]:
    """The device and how many a node has; what `auto` cannot find stays unknown."""
    if options.device != "auto":
        refuse_misspelt(options.device)
        return device_by_name(options.device, options.memory_gib), options.devices or 1
    from lit_gpt_dist.doctor.devices import visible_devices  # only here does planning look at the machine

    found = visible_devices()
    if not found:
        return device_by_name(platform.processor() or platform.machine(), options.memory_gib), options.devices or 1
    memory = options.memory_gib or found[0].memory_bytes / GIB
    return device_by_name(found[0].name, memory), options.devices or len(found)


def calibration_of(options: argparse.Namespace, device: Device) -> Calibration | None:
    if options.no_calibration:
        return None
    if options.calibration:
        return calibrations.load(options.calibration)
    key = next((key for key, known in DEVICES.items() if known.name == device.name), device.name)
    return calibrations.find(key)


def link_of(options: argparse.Namespace, device: Device, devices: int, calibration: Calibration | None) -> Link:
    if options.link:
        return link_by_name(options.link, device)
    measured = calibration.link(devices) if calibration and devices > 1 else None
    if measured or options.device != "auto" or devices == 1 or device.nvlink_bandwidth is None:
        return measured or UNKNOWN_LINK
    from lit_gpt_dist.doctor.gpus import nvidia_smi
    from lit_gpt_dist.doctor.topology import parse_topology

    topology = parse_topology(nvidia_smi("topo", "-m"))
    return link_by_name("nvlink", device) if topology and topology.fully_nvlinked else UNKNOWN_LINK


def refuse_misspelt(name: str) -> None:
    """A word close to a listed device is a slip; names with spaces are drivers' and may be of cards that are not listed.

    Raises:
        UserError: with the nearest names.
    """
    near = difflib.get_close_matches(name.lower(), [*DEVICES, "auto"], n=3, cutoff=0.6)
    if device_by_name(name).peak_flops is None and " " not in name and near:
        raise UserError(
            f"device {name!r} is not known; did you mean {' or '.join(near)}? One that is not listed is named as its driver prints it "
            f'("NVIDIA {name.upper()}"), with --memory_gib'
        )


def positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} is {value:g}, but must be above 0 and finite; give a positive number")


def check_learning_rate(base_lr: float | None, base_batch: int | None, optimizer: str) -> None:
    largest = LARGEST_LEARNING_RATE[optimizer]
    if (base_lr is None) != (base_batch is None):
        raise UserError("one of --base_lr and --base_batch is missing; the rule needs both")
    if base_lr is not None and not 0 < base_lr <= largest:
        raise UserError(
            f"base_lr is {base_lr:g}, but must be above 0 and at most {largest:g}; give a peak learning rate, such as 3e-4"
        )


def job_from(options: argparse.Namespace) -> Job:
    """Raises UserError for anything that cannot be planned."""
    positive(options, "devices", "nodes", "micro_batch", "global_batch", "memory_gib", "tokens", "mtbf_hours", "batch",
             "checkpoint_seconds", "base_batch")  # fmt: skip
    check_learning_rate(options.base_lr, options.base_batch, options.optimizer)
    names = (*SHAPE_OPTIONS, *SHAPE_CHOICES, *SHAPE_FLAGS)
    shape = {name: getattr(options, f"model.{name}") for name in names}
    device, devices = machine_of(options)
    calibration = calibration_of(options, device)
    return Job(
        preset(getattr(options, "model.size"), **shape),
        device,
        devices,
        options.nodes,
        link_of(options, device, devices, calibration),
        link_by_name(options.node_link, device) if options.node_link else UNKNOWN_LINK,
        options.global_batch or options.micro_batch * devices * options.nodes,
        options.micro_batch,
        options.precision,
        options.optimizer,
        options.recompute,
        options.recompute_blocks,
        options.flash,
        options.execution,
        options.overlap,
        options.no_sync,
        units=options.units,
        autocast=options.autocast,
        mfu=options.mfu,
        reserve_bytes=options.reserve_gib * GIB,
        calibration=calibration,
    )


def model_options(options: argparse.Namespace) -> str:
    """The --model options as given, for a `fit` command."""
    names = ("size", *SHAPE_OPTIONS, *SHAPE_CHOICES, *SHAPE_FLAGS)
    given = {name: getattr(options, f"model.{name}") for name in names}
    return " ".join(f"--model.{name} {str(value).lower()}" for name, value in given.items() if value is not None)
