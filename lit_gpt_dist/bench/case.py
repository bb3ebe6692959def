"""One configuration to measure, and the `fit` options that run it. Starts nothing."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

# A schedule laid out over the few steps of a measurement would bring the rate to its peak within ten of them. Losses jump then, and
# jumps make differences of rounding as large as those of faults.
SCHEDULE_STEPS = 1000


@dataclass(frozen=True)
class Case:
    """A configuration. Fields left at None are not passed on: `fit` decides."""

    size: str
    strategy: str
    devices: int
    micro: int
    accumulate: int
    precision: str | None = None
    recompute: str = "none"  # a kind, or kind:blocks
    compile: str | None = None
    cuda_graph: str | None = None
    context: int | None = None
    shape: tuple[tuple[str, Any], ...] = ()  # model fields that differ from the preset, e.g. (("layers", 48),)
    strategy_options: tuple[tuple[str, Any], ...] = ()  # constructor arguments of the strategy's class
    variant: str = ""  # what an ablation switched, in words

    @property
    def global_batch(self) -> int:
        return self.micro * self.accumulate * self.devices

    @property
    def recompute_kind(self) -> str:
        return self.recompute.partition(":")[0]

    @property
    def recompute_blocks(self) -> int | None:
        _, given, blocks = self.recompute.partition(":")
        return int(blocks) if given else None

    @property
    def name(self) -> str:
        """A folder name that says what it holds."""
        parts = [
            self.size,
            *(f"{field}{value}" for field, value in self.shape),
            self.strategy,
            f"{self.devices}x{self.micro}x{self.accumulate}",
        ]
        parts += [self.precision or "", f"context{self.context}" if self.context else ""]
        parts += [
            {"none": "", "full": "recompute"}.get(self.recompute, f"recompute-{self.recompute.replace(':', '-')}"),
            f"compile-{self.compile}" if self.compile else "",
        ]
        parts += [f"graph-{self.cuda_graph}" if self.cuda_graph else ""]
        parts += [f"{option}-{value}" for option, value in self.strategy_options]
        return "_".join(part for part in parts if part).replace(" ", "-").replace("/", "-").lower()

    def with_strategy_option(self, option: str, value: Any, variant: str) -> "Case":
        options = tuple(pair for pair in self.strategy_options if pair[0] != option)
        return dataclasses.replace(self, strategy_options=(*options, (option, value)), variant=variant)


@dataclass(frozen=True)
class Setting:
    """What all cases of a bench share."""

    steps: int = 20
    accelerator: str = "auto"
    corpus: str | None = None
    seed: int | None = None
    memory_fraction: float | None = None  # of each card; the rest is as if it were not there
    fit_options: tuple[str, ...] = ()  # further options of `fit`, passed on as they are


def case_hash(case: Case, setting: Setting) -> str:
    """Key under which a finished round is remembered: everything that decides what is run, and nothing else."""
    parts = [dataclasses.asdict(case) | {"variant": None}, dataclasses.asdict(setting), {"schedule": SCHEDULE_STEPS}]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fit_arguments(case: Case, setting: Setting, folder: str, tag: str) -> list[str]:
    """The options of one `fit`. It writes its result and nothing that would cost time: no samples, events or weights."""
    half = max(1, setting.steps // 2)  # two readings after warm-up, so that waiting for the device hardly counts
    options: dict[str, Any] = {
        "model.size": case.size,
        **{f"model.{field}": value for field, value in case.shape},
        "model.context": case.context,
        "model.recompute": case.recompute_kind if case.recompute != "none" else None,
        "model.recompute_blocks": case.recompute_blocks,
        "model.compile": case.compile,
        "model.cuda_graph": case.cuda_graph,
        "data.corpus": setting.corpus,
        "data.global_batch": case.global_batch,
        "data.micro_batch": case.micro,
        "trainer.accelerator": setting.accelerator,
        "trainer.devices": case.devices,
        "trainer.precision": case.precision,
        "trainer.max_steps": setting.steps,
        "trainer.log_every_n_steps": half,
        "optim.schedule_steps": max(SCHEDULE_STEPS, setting.steps),
        "trainer.limit_val_batches": 0,
        "trainer.logger": "false",
        "trainer.default_root_dir": folder,
        "checkpoint.save_at_end": "false",
        "sample_tokens": 0,
        "export": "false",
        "quiet": "true",
        "tag": tag,
        "seed_everything": setting.seed,
    }
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return [*words, *_strategy_arguments(case), *setting.fit_options]


def _strategy_arguments(case: Case) -> list[str]:
    if not case.strategy_options:
        return ["--trainer.strategy", case.strategy]
    from lit_gpt_dist.parallel import STRATEGIES  # lightning takes seconds to import

    words = ["--trainer.strategy", f"lit_gpt_dist.parallel.{STRATEGIES[case.strategy].__name__}"]
    for option, value in case.strategy_options:
        words += [f"--trainer.strategy.{option}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words
