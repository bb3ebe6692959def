"""The command line of ``fit``, ``validate`` and ``test``: LightningCLI with this project's classes, defaults that suit the
machine, and an end that says what was reached.

The parser's groups are ``--model`` (GPTModule), ``--data`` (GPTDataModule), ``--trainer`` (Lightning's Trainer),
``--optim``, ``--checkpoint``, and a few plain options.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.callbacks.final_validation import FinalValidation
from lit_gpt_dist.callbacks.hangs import record_collectives
from lit_gpt_dist.callbacks.monitor import watching
from lit_gpt_dist.callbacks.options import MonitorOptions
from lit_gpt_dist.callbacks.progress import StepBar
from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.callbacks.results import ResultsWriter
from lit_gpt_dist.callbacks.signals import SignalCallback
from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checks import check_options, check_seed, writable_run
from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.help import FULL, FullHelp
from lit_gpt_dist.loggers import loggers
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.optim.config import OptimConfig
from lit_gpt_dist.parsing import Parser, strategy_by_class
from lit_gpt_dist.runs import follow_launcher, global_rank, name_run
from lit_gpt_dist.saved_config import RunConfig
from lit_gpt_dist.summary import finish, say_loss
from lit_gpt_dist.trainer import Trainer

ROOT = "logs"
TRAINER_DEFAULTS = dict(
    default_root_dir=ROOT,
    max_epochs=-1,  # steps are counted, not epochs
    check_val_every_n_epoch=None,  # so that val_check_interval counts optimizer steps
    num_sanity_val_steps=0,
    log_every_n_steps=20,
    gradient_clip_val=1.0,
    enable_checkpointing=False,  # --checkpoint does it
    enable_model_summary=False,
    use_distributed_sampler=False,
)
STEPS = {"tiny": 2_000, "baby": 3_000}  # without --trainer.max_steps; other sizes need to be told
VALIDATIONS = 10  # over a run, without --trainer.val_check_interval


class TrainingCLI(LightningCLI):
    """LightningCLI whose unset options are filled in before anything is built, so that the saved configuration is whole."""

    def __init__(self, args: ArgsType, register: list["TrainingCLI"]) -> None:
        register.append(self)  # before anything can fail: whoever cleans up must find the Trainer
        self.new_folder: Path | None = None  # of the run; made by this process, or by nobody yet
        super().__init__(
            GPTModule,
            GPTDataModule,
            save_config_callback=RunConfig,
            trainer_class=Trainer,
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=1337,
            parser_class=Parser,
            parser_kwargs={"prog": "lit-gpt-dist"},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        kept = LightningCLI.subcommands()
        return {name: kept[name] | {"weights_only", "verbose"} for name in ("fit", "validate", "test")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(FULL, action=FullHelp, help="Show every option and exit.")
        parser.add_class_arguments(OptimConfig, "optim")
        parser.link_arguments("optim", "model.optim", apply_on="instantiate")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")
        parser.add_lightning_class_args(CheckpointCallback, "checkpoint")
        parser.add_class_arguments(MonitorOptions, "monitor")
        parser.add_argument(
            "--profile",
            type=str | None,
            default=None,
            help="Trace optimizer steps on every rank for `lit-gpt-dist trace`: a span as 20-24, or how many.",
        )
        parser.add_argument("--tag", type=str | None, default=None, help="Name of the run; by default size and time.")
        parser.add_argument(
            "--quiet",
            type=bool,
            default=False,
            help="Print nothing but errors, and how to go on where a run was stopped.",
        )
        parser.add_argument(
            "--matmul_precision",
            type=str | None,
            default=None,
            help="TF32 for fp32 products: highest (never), high or medium; by default highest, high under 16-bit precision.",
        )
        parser.add_argument(
            "--sample_tokens",
            type=int,
            default=200,
            help="Length of the text printed after training, by the exported weights; 0: none. Of those logged while training: "
            "--monitor.sample_tokens.",
        )
        parser.add_argument(
            "--sample_prompt", type=str, default="\n", help="What the text printed after training begins with."
        )
        parser.add_argument("--export", type=bool, default=True, help="Write the final weights as safetensors too.")

    # ---- between parsing and building -----------------------------------------------------------------------------

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, strategy_by_class(args) if isinstance(args, list) else args)
        check_seed(self.options.seed_everything)
        path = self.options.get("ckpt_path")
        if path and Path(path).is_file():
            if self.config["subcommand"] == "fit":
                raise UserError(
                    f"checkpoint {path} is a file, but training goes on from a folder; give the folder, or last, or start "
                    f"from the file's weights with --model.init_from {path}"
                )
            self.options.model.init_from, self.options.ckpt_path = str(path), None

    @property
    def options(self) -> Namespace:
        return self.config[self.config["subcommand"]]

    def before_instantiate_classes(self) -> None:
        options = self.options
        check_options(options, self.config["subcommand"])
        follow_launcher(options.trainer)
        limit_device_memory()
        on_gpu = options.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        if not options.model.init_from:  # weights bring their shape
            options.model.size = options.model.size or ("baby" if on_gpu else "tiny")
        options.trainer.precision = options.trainer.precision or ("bf16-mixed" if on_gpu else "32-true")
        half = str(options.trainer.precision).split("-")[0] in ("16", "bf16")
        options.matmul_precision = options.matmul_precision or ("high" if half else "highest")
        if options.matmul_precision not in ("highest", "high", "medium"):
            raise UserError(f"matmul_precision {options.matmul_precision!r} is not one of highest, high, medium")
        torch.set_float32_matmul_precision(options.matmul_precision)
        if self.config["subcommand"] == "fit":
            self._count_in_steps(options)
        root = options.trainer.default_root_dir or ROOT
        # as Lightning has it: two spellings of one folder would be two
        options.trainer.default_root_dir = os.path.normpath(os.path.expanduser(root))
        if self.config["subcommand"] == "fit":  # nothing else writes there
            writable_run(Path(options.trainer.default_root_dir))

    def _count_in_steps(self, options: Namespace) -> None:
        trainer = options.trainer
        if trainer.max_steps == -1:
            if options.model.size not in STEPS:
                raise UserError(
                    f"model size {options.model.size or 'of given weights'} has no usual number of steps; "
                    "give --trainer.max_steps"
                )
            trainer.max_steps = STEPS[options.model.size]
        if trainer.val_check_interval is None:
            trainer.val_check_interval = max(1, trainer.max_steps // VALIDATIONS)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self.options
        check_savers(self._get(self.config_init, "trainer"))
        fitting = self.config["subcommand"] == "fit"
        root = Path(options.trainer.default_root_dir)
        name, new = name_run(root, options.tag or "", options.model.size or "custom") if fitting else (None, False)
        if name and new and global_rank() == 0:
            self.new_folder = root / name
        if options.trainer.logger in (None, True):
            kwargs["logger"] = loggers(root, name, options.monitor.csv) if name else False
        bar = StepBar(options.quiet)
        ours = [FinalValidation(), bar]
        if fitting:
            extra = {"matmul_precision": options.matmul_precision}
            ours += [
                SignalCallback(),
                ResultsWriter(options.tag or name or "", shlex.join(["lit-gpt-dist", *sys.argv[1:]]), extra),
            ]
        self.trainer_defaults = {**self.trainer_defaults, "callbacks": ours}
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, ImportError) as mistake:  # Lightning about an option's value
            raise UserError(" ".join(str(mistake).split())) from mistake
        assert isinstance(trainer, Trainer)
        trainer.run_dir = root / name if name else root
        first: list[Callback] = [StepRecorder()]
        if fitting:
            record_collectives(trainer.run_dir)
            first = watching(self._get(self.config_init, "monitor"), options.profile)
        trainer.callbacks[:0] = first  # type: ignore[attr-defined]
        return trainer

    # ---- around the run -------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        """Lightning's own, with ``last`` resolved, and one line before and a summary after ``fit``."""
        root = Path(self.trainer.default_root_dir)
        chosen, tag = self.config_init[subcommand], self.options.tag
        asked = chosen.get("ckpt_path")
        if asked:
            chosen["ckpt_path"] = self.options.ckpt_path = find.resolve(asked, root, tag)
            if subcommand == "fit" and chosen["ckpt_path"] is None and global_rank() == 0 and not self.options.quiet:
                print(f"{find.none_yet(root, tag)}: starting from step 0")
        if subcommand == "fit" and chosen.get("ckpt_path"):
            self._keep_global_batch(Path(chosen["ckpt_path"]), tag)
        if subcommand != "fit" and not chosen.get("ckpt_path") and not self.options.model.init_from:
            why = f", and there is {find.none_yet(root, tag)}" if asked else ""
            raise UserError(f"{subcommand} needs weights{why}; give --ckpt_path last or --ckpt_path PATH")
        super()._run_subcommand(subcommand)
        if subcommand == "fit":
            finish(self.trainer, self.options)
        else:
            say_loss(self.trainer)

    def _keep_global_batch(self, path: Path, tag: str | None) -> None:
        """A resumed run keeps its global batch where nobody gives one: this decides its curve, not the number of devices."""
        given = self.options.data.global_batch or self.options.trainer.accumulate_grad_batches > 1
        saved = find.peek(path, tag).get("lightning", {}).get(GPTDataModule.__qualname__, {}).get("global_batch")
        if not given and isinstance(saved, int):
            self.datamodule.global_batch = self.options.data.global_batch = saved

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        own_words = {} if subcommand == "fit" else {"verbose": False}  # ``say_loss`` instead of Lightning's table
        return super()._prepare_subcommand_kwargs(subcommand) | own_words


def check_savers(trainer: Namespace) -> None:
    """Lightning would answer that its checkpoints are off, which nobody has asked for."""
    given = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
    for saver in given:
        if isinstance(saver, Checkpoint) and not trainer.enable_checkpointing:
            raise UserError(
                f"trainer.callbacks has a {type(saver).__name__}, but --checkpoint saves here; use --checkpoint.every_n_steps, "
                "keep_last and keep_best, or --trainer.enable_checkpointing true for both"
            )


def limit_device_memory() -> None:
    """LIT_GPT_DIST_MEMORY_FRACTION: pretend the cards were smaller, to try what fits."""
    share = os.environ.get("LIT_GPT_DIST_MEMORY_FRACTION")
    if share and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(float(share), index)
