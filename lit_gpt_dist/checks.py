"""Refuses, before anything is built or written, options that the parser takes and training would stumble over."""

import contextlib
import os
import shlex
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lit_gpt_dist.arguments import nearest
from lit_gpt_dist.checkpoint.format import FOLDER
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import PRESETS
from lit_gpt_dist.parallel import STRATEGIES
from lit_gpt_dist.parallel.replicated import check_buckets
from lit_gpt_dist.parallel.strategies import check_timeout
from lit_gpt_dist.parsing import PRECISIONS
from lit_gpt_dist.runs import global_rank

MOST_SEED = 2**32 - 1  # numpy's largest
# those that Lightning looks for
LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
# what starts processes on several machines by hand: without the address a machine waits for itself, without the port each
# opens one of its own, and without the number each takes itself for the first
BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
SHORT_PRECISIONS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}  # Lightning's own aliases


def check_options(options: Namespace, stage: str) -> None:
    """All that can be told without a corpus.

    Raises:
        UserError: value, rule and remedy.
    """
    for group in ("trainer", "model", "data"):
        if not isinstance(options.get(group), Namespace):
            raise UserError(f"{group} {options.get(group)!r} is not a group of options; give {group}: {{NAME: VALUE}}")
    trainer = options.trainer
    check_strategy(trainer.strategy)
    check_size(options.model.size)
    check_devices(trainer.accelerator, trainer.devices)
    check_launcher(trainer)
    check_precision(trainer.precision, trainer.accelerator)
    check_tag(options.tag)
    if stage == "fit" and trainer.max_epochs not in (None, -1):
        raise UserError(
            f"trainer.max_epochs {trainer.max_epochs}: training counts optimizer steps; use --trainer.max_steps"
        )
    if isinstance(trainer.val_check_interval, float):
        raise UserError(
            f"trainer.val_check_interval {trainer.val_check_interval}: the data have no end to take a share of; "
            "give a whole number of optimizer steps"
        )
    for name, value, least in (
        ("trainer.max_steps", None if trainer.max_steps == -1 else trainer.max_steps, 1),
        ("trainer.val_check_interval", trainer.val_check_interval, 1),
        ("trainer.log_every_n_steps", trainer.log_every_n_steps, 1),
        ("trainer.gradient_clip_val", trainer.gradient_clip_val, 0),
        ("trainer.num_nodes", trainer.num_nodes, 1),
        ("trainer.accumulate_grad_batches", trainer.accumulate_grad_batches, 1),
        ("sample_tokens", options.sample_tokens, 0),
    ):
        if isinstance(value, int | float) and value < least:
            raise UserError(f"{name} {value} is below {least}; give {least} or more")


def check_strategy(strategy: Any) -> None:
    if isinstance(strategy, str) and strategy not in ("auto", *STRATEGIES):
        names = ", ".join(["auto", *STRATEGIES])
        raise UserError(
            f"strategy {strategy!r} does not exist{nearest(strategy, ['auto', *STRATEGIES])} ({names}, or a class path)"
        )
    if isinstance(strategy, Namespace) and (options := strategy.get("init_args")):
        check_buckets(options.get("overlap"), options.get("bucket_cap_mb"))
        check_timeout(options.get("timeout_seconds", 1.0))


def check_size(size: str | None) -> None:
    if size is not None and size not in PRESETS:
        raise UserError(f"model.size {size} is not one of {', '.join(PRESETS)}{nearest(size, list(PRESETS))}")


def check_devices(accelerator: Any, devices: Any) -> None:
    kinds = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
    if isinstance(accelerator, str) and accelerator not in kinds:
        raise UserError(
            f"trainer.accelerator {accelerator} is not one of {', '.join(kinds)}; for this machine use auto"
        )
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    there = torch.cuda.device_count() if on_gpu else None
    if on_gpu and not there:
        raise UserError(f"accelerator {accelerator}: this machine has no usable GPU; use --trainer.accelerator cpu")
    if devices in ("auto", -1, "-1"):
        return
    listed = isinstance(devices, list) or "," in str(devices)
    numbers = words_of(devices)
    if not numbers or not all(number.isdigit() for number in numbers) or (numbers == ["0"] and not listed):
        raise UserError(
            f"trainer.devices {devices} is neither a number of devices nor a list of them; give for example 2, 0,1 or auto"
        )
    if listed and not on_gpu:
        raise UserError(
            f"trainer.devices {devices}: without GPUs devices have no numbers; give how many processes to use"
        )
    needed = max(int(number) for number in numbers) + (1 if listed else 0)
    if there and needed > there:
        raise UserError(
            f"trainer.devices {devices}: this machine has {there} GPUs; use --trainer.devices {there} or fewer"
        )


def words_of(devices: Any) -> list[str]:
    """A number of devices, or each of a list of them."""
    return str(devices).strip("[]").replace(",", " ").split()


def check_launcher(trainer: Namespace) -> None:
    """Several machines, and nothing that starts processes on the others: this one would wait for them in silence.

    Variables set by hand on each machine are Lightning's own way, and go without a launcher.
    """
    nodes = trainer.num_nodes
    if trainer.plugins or any(environment.detect() for environment in LAUNCHERS):
        return
    if nodes <= 1:
        check_meeting_point(trainer)
        return
    missing = [name for name in BY_HAND if name not in os.environ]
    if not missing:
        return
    command = f"type on each (HOST: the first one) {_torchrun(trainer)} (docs/training.md#several-machines)"
    if len(missing) == len(BY_HAND):
        raise UserError(
            f"trainer.num_nodes {nodes}, but there is no launcher to start the other machines' processes; {command}"
        )
    given = " and ".join(name for name in BY_HAND if name in os.environ)
    raise UserError(
        f"trainer.num_nodes {nodes} and {given} set by hand, but without {' and '.join(missing)} the machines never meet; "
        f"set all of {', '.join(BY_HAND)} on each (NODE_RANK 0 on the first), or {command}"
    )


def check_meeting_point(trainer: Namespace) -> None:
    """Processes of one machine meet at MASTER_ADDR, which a cluster's shell may have left set to another machine: they would
    wait there in silence."""
    address = os.environ.get("MASTER_ADDR")
    numbers = words_of(trainer.devices)
    alone = numbers == ["1"] or (isinstance(trainer.devices, list) and len(numbers) == 1)
    if address and not alone and not is_this_machine(address):
        raise UserError(
            f"MASTER_ADDR {address} is not an address of this machine, on which all {trainer.devices} processes are to run; unset it"
        )


def is_this_machine(address: str) -> bool:
    """Whether a socket can be opened at it."""
    try:
        places = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in places:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as opened:
            opened.bind(place)
            return True
    return False


def _torchrun(trainer: Namespace) -> str:
    """What starts the command that was typed on all machines."""
    numbers = words_of(trainer.devices)
    devices = len(numbers) if len(numbers) > 1 else numbers[0] if numbers and numbers[0].isdigit() else None
    return (
        f"torchrun --nnodes {trainer.num_nodes} --nproc-per-node {devices or max(1, torch.cuda.device_count())} "
        f"--rdzv-backend c10d --rdzv-endpoint HOST:29500 -m lit_gpt_dist {shlex.join(sys.argv[1:])}"
    )


def check_precision(precision: Any, accelerator: Any) -> None:
    if precision is None:
        return
    name = SHORT_PRECISIONS.get(str(precision), str(precision))
    if name not in PRECISIONS:
        raise UserError(f"precision {precision} is not one of {', '.join(PRECISIONS)}")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if name == "16-mixed" and on_cpu:
        raise UserError("precision 16-mixed does not run on a CPU; use bf16-mixed or 32-true")


def check_tag(tag: str | None) -> None:
    if tag is not None and (not tag.strip() or "/" in tag or "\\" in tag or tag.startswith(".")):
        raise UserError(f"tag {tag!r} names a folder of runs; use letters, digits, - and _")


def check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MOST_SEED:
        raise UserError(
            f"seed_everything {str(seed).lower()} is not a whole number from 0 to {MOST_SEED}; give for example 1337"
        )


def writable_run(root: Path) -> None:
    """All that a run will write to, before its first step: what was trained must not be lost at its end."""
    writable(root)
    writable(root / FOLDER)
    results = root / "results.jsonl"
    if global_rank() != 0 or not results.exists():
        return
    try:
        with results.open("a"):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot add to {results}: {reason}; choose another --trainer.default_root_dir") from error


def writable(folder: Path) -> None:
    """Fails now rather than after the first hour, and leaves nothing behind."""
    if global_rank() != 0:
        return  # the first rank's answer holds, and two would trip over each other
    remedy = "choose another --trainer.default_root_dir"
    try:
        existing = next(path for path in (folder, *folder.parents) if _is_there(path))
        if not existing.is_dir():
            what = "a file" if existing.exists() else "a link that leads nowhere"
            raise UserError(f"cannot write to {folder}: {existing} is {what}, but runs need a folder; {remedy}")
        # not the folder itself: another run that starts now may be making it, too
        with tempfile.TemporaryDirectory(prefix=".writable-", dir=existing):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write to {folder}: {reason}; {remedy}") from error


def _is_there(path: Path) -> bool:
    """Also as a link that leads nowhere.

    Raises:
        OSError: nothing can have this name.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
