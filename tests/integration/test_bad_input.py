"""A mistake of the user's: one clear line with value, rule and remedy, exit code 2, no traceback, nothing written."""

from pathlib import Path

import pytest
from helpers.commands import COMMAND, SMALL, Ended, here, run, torchrun

from lit_gpt_dist.checks import writable

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def assert_refused(ended: Ended, *words: str) -> None:
    assert ended.code == 2, ended.text
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in ended.text
    for internal in ("class '", "Namespace", "NestedArg", "unicode string"):
        assert internal not in ended.text, "no internal names"
    for word in words:
        assert word in lines[0], f"{word!r} is not in: {lines[0]}"


# arguments of fit, and what its one line must say
OPTIONS = {
    "a misspelt group": (["--modle.size", "tiny"], ["--modle.size", "did you mean --model.size?"]),
    "a misspelt option of a group": (["--trainer.max_step", "5"], ["did you mean --trainer.max_steps?"]),
    "a misspelt plain option": (["--tagg", "x"], ["did you mean --tag?"]),
    "an option without its group": (["--max_steps", "3"], ["did you mean --trainer.max_steps?"]),
    "dashes for underscores": (["--data.global-batch", "64"], ["did you mean --data.global_batch?"]),
    "an unknown option": (["--frobnicate", "3"], ["unknown option --frobnicate", "--help"]),
    "a word too many": (["tiny"], ["unexpected argument tiny"]),
    "no value": (["--trainer.max_steps"], ["--trainer.max_steps needs a value", "whole number"]),
    "text for a number": (["--trainer.max_steps", "many"], ["trainer.max_steps many", "whole number"]),
    "a fraction for a whole number": (["--data.micro_batch", "1.5"], ["data.micro_batch 1.5", "whole number"]),
    "text for a rate": (["--optim.lr", "fast"], ["optim.lr fast", "a number"]),
    "text for yes or no": (["--export", "maybe"], ["export maybe", "true or false"]),
    "a negative rate": (["--optim.lr", "-1"], ["optim.lr -1", "above 0"]),
    "an unknown choice": (["--model.recompute", "half"], ["model.recompute half", "none, selective, full"]),
    "blocks that are not there": (
        ["--model.recompute", "full", "--model.recompute_blocks", "3"],
        ["recompute_blocks is 3", "2 layers", "leave it out"],
    ),
    "an unknown size": (["--model.size", "babby"], ["babby", "gpt2-124m", "did you mean baby?"]),
    "an unknown strategy": (["--trainer.strategy", "fdsp"], ["'fdsp'", "did you mean fsdp2?"]),
    "an unknown strategy class": (["--trainer.strategy", "lit_gpt_dist.parallel.FSDP3"], ["FSDP3", "does not exist"]),
    "a strategy's misspelt option": (
        ["--trainer.strategy", "DDP", "--trainer.strategy.bucket_cap", "5"],
        ["bucket_cap", "did you mean --trainer.strategy.bucket_cap_mb?"],
    ),
    "buckets that would not be used": (
        ["--trainer.strategy", "ddp", "--trainer.strategy.bucket_cap_mb", "50", "--trainer.strategy.overlap", "false"],
        ["bucket_cap_mb 50", "overlap false"],
    ),
    "buckets of no size": (
        ["--trainer.strategy", "ddp", "--trainer.strategy.bucket_cap_mb", "-1"],
        ["bucket_cap_mb -1", "above 0"],
    ),
    "no time for a collective": (
        ["--trainer.strategy", "fsdp2", "--trainer.strategy.timeout_seconds", "-1"],
        ["timeout_seconds -1", "above 0"],
    ),
    "fewer workers than none": (["--data.workers", "-1"], ["workers -1", "below 0"]),
    "weights that would grow": (["--optim.weight_decay", "-1"], ["optim.weight_decay -1", "0 or more"]),
    "an option of no strategy": (["--trainer.strategy.bucket_cap_mb", "5"], ["named before", "--trainer.strategy ddp"]),
    "an unknown precision": (["--trainer.precision", "8"], ["precision 8", "32-true, bf16-mixed"]),
    "fp16 on a CPU": (["--trainer.precision", "16-mixed"], ["16-mixed", "bf16-mixed or 32-true"]),
    "an unknown accelerator": (["--trainer.accelerator", "npu"], ["npu", "cpu, gpu"]),
    "no devices": (["--trainer.devices", "0"], ["trainer.devices 0"]),
    "devices in words": (["--trainer.devices", "two"], ["trainer.devices two"]),
    "epochs": (["--trainer.max_epochs", "3"], ["max_epochs 3", "--trainer.max_steps"]),
    "no steps": (["--trainer.max_steps", "0"], ["max_steps 0", "1 or more"]),
    "validation by shares": (["--trainer.val_check_interval", "0.5"], ["val_check_interval 0.5", "whole number"]),
    "no steps between readings": (["--trainer.log_every_n_steps", "0"], ["log_every_n_steps 0"]),
    "a checkpoint every 0 steps": (["--checkpoint.every_n_steps", "0"], ["every_n_steps is 0"]),
    "Lightning's own saver": (
        ["--trainer.callbacks+=ModelCheckpoint"],
        ["ModelCheckpoint", "--checkpoint.every_n_steps", "--trainer.enable_checkpointing true"],
    ),
    "a class that is not there": (
        ["--trainer.callbacks+=mycb.Nope"],
        ["trainer.callbacks mycb.Nope", "No module named 'mycb'", "MODULE.NAME"],
    ),
    "a class path that is not there": (
        ["--trainer.callbacks.class_path", "foo.Bar"],
        ["trainer.callbacks foo.Bar: No"],
    ),
    "a class that is no callback": (["--trainer.callbacks+=os.path.join"], ["os.path.join is not a Callback"]),
    "a class without its argument": (
        ["--trainer.callbacks+=EarlyStopping"],
        ["EarlyStopping needs monitor", "--trainer.callbacks.monitor VALUE"],
    ),
    "a class's misspelt argument": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.montor", "val/loss"],
        ["did you mean --trainer.callbacks.monitor?"],
    ),
    "a class's argument of another type": (
        ["--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: a, patience: x}}]"],
        ["trainer.callbacks.patience x is not a whole number"],
    ),
    "a negative clip": (["--trainer.gradient_clip_val", "-1"], ["gradient_clip_val -1"]),
    "a seed in words": (["--seed_everything", "lucky"], ["seed_everything lucky", "whole number"]),
    "a negative seed": (["--seed_everything", "-1"], ["seed_everything -1", "4294967295"]),
    "a tag that leaves the folder": (["--tag", "../elsewhere"], ["'../elsewhere'"]),
    "heads that do not divide": (["--model.heads", "5"], ["width 64", "5 heads", "60 or 65"]),
    "dropout of everything": (["--model.dropout", "1.5"], ["dropout 1.5"]),
    "a global batch that does not divide": (
        ["--data.global_batch", "50"],
        ["global batch 50", "micro batch 4", "48 or 52"],
    ),
    "a micro batch of nothing": (["--data.micro_batch", "0"], ["micro_batch 0"]),
    "an accumulation that contradicts": (
        ["--data.global_batch", "64", "--trainer.accumulate_grad_batches", "3"],
        ["global batch 64", "accumulate 3"],
    ),
    "a vocabulary too small": (["--model.vocab_size", "4"], ["--model.vocab_size 76"]),
    "an unknown tokenizer": (["--data.tokenizer", "word"], ["tokenizer 'word'", "char"]),
    "a context beyond the corpus": (["--model.context", "100000"], ["11358 tokens", "context 100000"]),
    "no such corpus": (["--data.corpus", "nowhere.txt"], ["nowhere.txt does not exist"]),
    "no such checkpoint": (["--ckpt_path", "nowhere"], ["nowhere does not exist"]),
    "no such config": (["--config", "nowhere.yaml"], ["nowhere.yaml does not exist"]),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_bad_option_is_one_line_and_leaves_nothing(what: str, text: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, words = OPTIONS[what]
    corpus = [] if "--data.corpus" in arguments else ["--data.corpus", str(text)]
    assert_refused(here("fit", *SMALL, *corpus, *arguments), *words)
    assert list(tmp_path.iterdir()) == []


CORPORA = {
    "empty": (b"", ["is empty"]),
    "too short": (b"hello", ["5 tokens", "context 32", "longer text"]),
    "not UTF-8": ("café ".encode("latin-1") * 500, ["not UTF-8", "0xe9", "iconv"]),
}


@pytest.mark.parametrize("what", CORPORA)
def test_bad_corpus_is_one_line(what: str, tmp_path: Path) -> None:
    content, words = CORPORA[what]
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(content)
    ended = here("fit", *SMALL, "--data.corpus", str(corpus), "--trainer.default_root_dir", str(tmp_path / "logs"))
    assert_refused(ended, *words)
    assert not (tmp_path / "logs").exists()


CONFIGS = {
    "a misspelt key": ("model:\n  sise: tiny\n", ["model.sise", "did you mean --model.size?"]),
    "a misspelt group": ("modle:\n  size: tiny\n", ["modle.size", "did you mean --model.size?"]),
    "a wrong type": ("trainer:\n  max_steps: many\n", ["trainer.max_steps many", "whole number"]),
    "no YAML": ("model: [\n", ["bad.yaml", "YAML", "at line 2"]),
    "a list": ("- a\n", ["bad.yaml", "YAML", "configs/tiny.yaml"]),
    "an unknown class": (
        "trainer:\n  strategy:\n    class_path: lit_gpt_dist.parallel.DPD\n",
        ["strategy", "lit_gpt_dist.parallel.DPD"],
    ),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_bad_config_is_one_line(what: str, tmp_path: Path) -> None:
    content, words = CONFIGS[what]
    config = tmp_path / "bad.yaml"
    config.write_text(content)
    assert_refused(here("fit", "--config", str(config)), *words)


def test_unwritable_folder_is_refused_before_training(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for folder in (file, file / "logs"):
        ended = here("fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(folder))
        assert_refused(ended, str(folder), "is a file", "--trainer.default_root_dir")
    assert file.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    for folder in (link, link / "logs"):
        ended = here("fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(folder))
        assert_refused(ended, "is a link that leads nowhere", "--trainer.default_root_dir")
    ended = here(
        "fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path / ("long" * 100))
    )
    assert_refused(ended, "file name too long", "--trainer.default_root_dir")


def test_what_a_run_writes_at_its_end_is_looked_at_before_its_first_step(text: Path, tmp_path: Path) -> None:
    options = ("fit", *SMALL, "--data.corpus", str(text), "--trainer.default_root_dir", str(tmp_path))
    (tmp_path / "checkpoints").write_text("precious")
    assert_refused(here(*options), "checkpoints is a file", "--trainer.default_root_dir")
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "results.jsonl").mkdir()
    assert_refused(here(*options), "cannot add to", "results.jsonl: is a directory", "--trainer.default_root_dir")
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_a_folder_is_looked_at_without_making_it(tmp_path: Path) -> None:
    """Runs that start at the same time may all need it."""
    writable(tmp_path / "new" / "logs")
    assert list(tmp_path.iterdir()) == []


def test_validation_without_weights_is_refused(tmp_path: Path) -> None:
    for arguments in ([], ["--ckpt_path", "last"]):
        ended = here(
            "validate", *arguments, "--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(tmp_path)
        )
        assert_refused(ended, "needs weights", "--ckpt_path")


def test_unknown_command_and_options_of_tools_get_a_suggestion() -> None:
    assert_refused(here("fut"), "did you mean fit?")
    assert_refused(here("generate", "--temprature", "3"), "did you mean --temperature?")
    assert_refused(here("generate", "nowhere"), "nowhere does not exist")


@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_a_mistake_is_told_once_however_many_ranks_make_it(launcher: str, text: Path, tmp_path: Path) -> None:
    start = COMMAND if launcher == "own" else [*torchrun(2), "-m", "lit_gpt_dist"]
    ended = run(
        *start, "fit", *SMALL, "--data.corpus", str(text), "--data.global_batch", "50",
        "--trainer.strategy", "ddp", "--trainer.devices", "2", cwd=tmp_path,
    )  # fmt: skip
    assert ended.code != 0
    assert ended.err.count("error: global batch 50 is not divisible") == 1, ended.err
    assert "lit_gpt_dist/" not in ended.err, "no traceback of ours"
    assert list(tmp_path.iterdir()) == []
