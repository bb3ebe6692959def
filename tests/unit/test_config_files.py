"""Every file in configs/ parses, names a model that can be built, and merges with every overlay."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from jsonargparse import Namespace

from lit_gpt_dist.data.corpus import load_corpus
from lit_gpt_dist.data.windows import plan_batch, usual_micro
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import PRESETS, preset
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.optim.config import LEARNING_RATES
from lit_gpt_dist.parallel import HSDP, STRATEGIES
from lit_gpt_dist.parallel.compile import Compile
from lit_gpt_dist.training_cli import TrainingCLI

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = sorted(CONFIGS.glob("*.yaml"))
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
OVERLAYS = sorted((CONFIGS / "strategy").glob("*.yaml"))


class ParsedOnly(TrainingCLI):
    """The command line up to the point where something would be built."""

    def instantiate_classes(self) -> None:
        self.parser.instantiate_classes(self.config)  # the classes themselves: their constructors refuse what cannot be
        raise Parsed(self)


class Parsed(Exception):
    pass


def parsed(*arguments: str) -> Namespace:
    """The options of ``fit`` with these arguments, checked and filled in as for a run."""
    with pytest.raises(Parsed) as raised:
        ParsedOnly(["fit", "--trainer.accelerator", "cpu", *arguments], [])
    return raised.value.args[0].options


def test_there_is_a_config_for_every_size_and_every_strategy() -> None:
    assert {path.stem for path in SIZES} == set(PRESETS)
    assert {path.stem for path in OVERLAYS} == set(STRATEGIES)


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.stem)
def test_config_parses_and_its_model_is_built_with_the_shape_it_tells(path: Path) -> None:
    options = parsed("--config", str(path))
    assert options.model.size == path.stem
    shape = {name: value for name, value in options.model.items() if name in GPTModule().shape}
    config = preset(options.model.size, **shape)
    with torch.device("meta"):
        model = GPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters()
    for name, told in comments(path).items():  # "width: null  # 64" says what null comes to
        assert str(getattr(config, name)) == told, f"{path.name}: {name} is {getattr(config, name)}"
    assert comments(path, "optim")["lr"] == f"peak rate; null: {LEARNING_RATES[path.stem]:.5f}".rstrip("0")


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.stem)
def test_choices_told_in_a_comment_are_those_that_fit_takes(path: Path, text: Path) -> None:
    told = dict(re.findall(r"\n  (compile|tokenizer): .*?# (.*);", path.read_text()))
    kinds = set(re.split(", | or ", told["compile"].removeprefix("torch.compile: ")))
    assert kinds | {"auto"} == set(get_args(Compile))
    for name in re.split(", | or a ", told["tokenizer"].partition(";")[0]):
        if name != "tokenizer.json":
            load_corpus(str(text), name)


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_config_divides_its_global_batch_over_one_two_and_four_ranks(path: Path, ranks: int) -> None:
    data = yaml.safe_load(path.read_text())["data"]
    micro_batch = data["micro_batch"] or usual_micro(64, data["global_batch"], None, ranks)
    plan = plan_batch(data["global_batch"], micro_batch, None, ranks)
    assert plan.accumulate * plan.micro_batch * ranks == data["global_batch"]


def comments(path: Path, group: str = "model") -> dict[str, str]:
    """What the file says of options that are null: the comment behind each; of shapes only where it is one value."""
    section = path.read_text().split(f"\n{group}:\n")[1].split("\n\n")[0]
    told = {}
    for line in section.splitlines():
        option, _, comment = line.partition("  # ")
        name, _, value = option.strip().partition(": ")
        first = comment.split(";")[0].split(":")[0]
        if value == "null" and (group != "model" or " " not in first):
            told[name] = comment if group != "model" else first.replace("true", "True").replace("false", "False")
    return told


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_merge_over_a_size_and_name_their_strategy(overlay: Path) -> None:
    options = parsed("--config", str(CONFIGS / "baby.yaml"), "--config", str(overlay))
    assert options.model.size == "baby"
    strategy = options.trainer.strategy
    name = strategy if isinstance(strategy, str) else strategy.class_path.rpartition(".")[2].lower()
    assert name == overlay.stem


def test_command_line_overrides_a_strategy_with_options_in_yaml() -> None:
    ddp = ("--config", str(CONFIGS / "tiny.yaml"), "--config", str(CONFIGS / "strategy" / "ddp.yaml"))
    assert parsed(*ddp, "--trainer.strategy", "fsdp2").trainer.strategy == "fsdp2"
    assert parsed("--trainer.strategy", "fsdp2", *ddp).trainer.strategy.class_path == "lit_gpt_dist.parallel.DDP"
    changed = parsed(*ddp, "--trainer.strategy.bucket_cap_mb", "7").trainer.strategy
    assert (changed.init_args.bucket_cap_mb, changed.init_args.no_sync) == (7, True)
    other = parsed(*ddp, "--trainer.strategy", "lit_gpt_dist.parallel.FSDP2").trainer.strategy
    assert other.class_path == "lit_gpt_dist.parallel.FSDP2"
    assert "bucket_cap_mb" not in other.init_args


@pytest.mark.parametrize(("name", "strategy"), STRATEGIES.items())
def test_strategy_names_and_class_paths_build_this_projects_classes(name: str, strategy: type) -> None:
    from lit_gpt_dist.trainer import Trainer

    for given in (name, strategy()):
        trainer = Trainer(accelerator="cpu", devices=1, strategy=given, logger=False, enable_checkpointing=False)
        assert type(trainer.strategy) is strategy


def test_groups_of_hsdp_must_divide_the_ranks_and_are_those_of_a_machine_by_default(monkeypatch) -> None:
    monkeypatch.setattr(HSDP, "world_size", 4)
    monkeypatch.setattr(HSDP, "num_processes", 2)
    assert HSDP().degrees() == {"replicate": 2, "shard": 2}
    assert HSDP(shard_ranks=4).degrees() == {"replicate": 1, "shard": 4}
    with pytest.raises(UserError, match=r"4 ranks do not divide into groups of shard_ranks 3; use one of 1, 2, 4"):
        HSDP(shard_ranks=3).degrees()
