"""`lit-gpt-dist plan` as a person uses it: in process, except for what it imports."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import preset
from lit_gpt_dist.planner.command import main
from lit_gpt_dist.planner.estimate import estimate
from lit_gpt_dist.planner.explain import FIGURES
from lit_gpt_dist.planner.layout import STRATEGIES
from lit_gpt_dist.planner.options import job_from, parser
from lit_gpt_dist.planner.render import memory_table, time_table

MACHINE = ["--device", "h100", "--devices", "8", "--link", "nvlink", "--no_calibration"]
BIG = ["--model.size", "big", "--model.context", "1024", "--model.vocab_size", "50304", "--global_batch", "512"]


def run(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_a_plan_shows_every_strategy_and_recommends_one(capsys):
    out = run(capsys, *BIG, *MACHINE)
    for name in ("single", "ddp", "zero1", "zero2", "fsdp2", "hsdp", "tp", "pp"):
        assert name in out
    assert "Recommended: FSDP2" in out
    assert "lit-gpt-dist fit --model.size big --model.context 1024" in out


def test_strategies_that_cannot_split_the_batch_are_named_where_others_can(capsys):
    out = run(capsys, "--model.size", "baby", *MACHINE, "--global_batch", "96")
    assert "ddp, zero1, zero2, fsdp2: global batch 96 is not divisible by micro batch 16 × 8 data ranks = 128" in out


HEADERS = {
    "strategy",
    "fits",
    "peak",
    "weights",
    "workspace",
    "moment",
    "no no_sync",
    "exposed ms",
    "step ms",
    "tok/s",
    "eff.",
}


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_tables_leave_columns_out_rather_than_cut_them_and_say_which(width):
    estimates = [estimate(job_from(parser().parse_args([*BIG, *MACHINE])), name) for name in STRATEGIES]
    console = Console(width=width, file=io.StringIO())
    for table in (memory_table(estimates), time_table(estimates)):
        table.print_to(console)
    out = console.file.getvalue()
    assert all(header in out for header in HEADERS)  # in the table or among those left out
    assert ("Too narrow here for: " in out) == (width < 160)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= width
    for header in ("strategy", "fits", "peak", "step ms", "tok/s", "eff."):
        assert f" {header} " in out


def test_a_pipe_has_every_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, *BIG, *MACHINE)
    assert "Too narrow" not in out
    assert " workspace " in out


def test_planning_imports_neither_torch_nor_lightning():
    code = (
        "import sys; from lit_gpt_dist.planner.command import main; main(sys.argv[1:]);"
        "print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, *MACHINE], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip().endswith("[]")


def test_json_holds_the_same_figures(capsys):
    data = json.loads(run(capsys, *BIG, *MACHINE, "--json", "--tokens", "3e10"))
    ddp = data["strategies"]["ddp"]
    assert ddp["peak_bytes"] == pytest.approx(sum(ddp["footprint"]["kinds"].values()))
    assert data["advice"]["strategy"] == "fsdp2"
    assert data["cost_fsdp2"]["days"] > 0


@pytest.mark.parametrize("figure", FIGURES)
def test_explain_prints_the_arithmetic(capsys, figure):
    out = run(capsys, *BIG, *MACHINE, "--explain", figure)
    assert out.startswith(f"{figure} under ddp")


def test_one_strategy_in_detail_explains_everything(capsys):
    out = run(capsys, *BIG, *MACHINE, "--strategy", "fsdp2")
    assert all(f"{figure} under fsdp2" in out for figure in FIGURES)


def test_a_plan_says_in_how_many_blocks_activations_are_recomputed(capsys):
    some = ["--recompute", "full", "--recompute_blocks", "6"]
    out = run(capsys, *BIG, *MACHINE, *some)
    assert "recompute full in 6 of 24 blocks" in out
    assert "Activations of one micro-batch on one card, recomputed in 6 of 24 blocks" in out
    out = run(capsys, *BIG, *MACHINE, *some, "--strategy", "ddp")
    assert "each of the first 6 of 24 blocks keeps its input only, 4,096 bytes a token" in out
    assert "(6 layers × 4,096 + 18 layers × 65,616 + ends" in out
    assert "× 1.08 (recomputation)" in out


def test_an_unknown_device_says_once_what_is_unknown(capsys):
    out = run(capsys, "--device", "NVIDIA Something")
    assert out.count("no MFU either") == 1
    assert "nothing can be said to fit" in out


def test_failures_tokens_and_learning_rates_are_answered(capsys):
    out = run(capsys, *MACHINE, "--mtbf_hours", "720", "--nodes", "64", "--global_batch", "8192", "--base_lr", "3e-4",
              "--base_batch", "2048", "--tokens", "1e10", "--node_link", "40")  # fmt: skip
    assert "every 11.25 h" in out
    assert "save every 52 minutes" in out
    assert "0.0006" in out
    assert "card-hours" in out


def test_inference_shows_each_width(capsys):
    out = run(
        capsys, "--task", "inference", "--model.size", "4b", "--batch", "64", "--device", "rtx4090", "--no_calibration"
    )
    assert "key/value cache" in out
    assert "cards hold it at 16 bits" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--device", "rtx4090", "--link", "nvlink"], "nvlink"),
        (["--device", "h100", "--micro_batch", "0"], "micro_batch"),
        (["--device", "h100", "--mfu", "1.5"], "mfu"),
        (["--device", "h100", "--base_lr", "1e-3"], "base_batch"),
        (["--device", "h100", "--base_lr", "2", "--base_batch", "8"], "base_lr is 2, but must be"),
        (["--device", "h100", "--base_lr", "0", "--base_batch", "8"], "base_lr is 0, but must be"),
        (["--device", "h100", "--tokens", "inf"], "tokens is inf"),
        (["--device", "h10"], "'h10' is not known; did you mean h100"),
        (["--device", "h100", "--explain", "nothing"], "nothing"),
        (["--device", "h100", "--compare", "/no/such/file"], "/no/such/file"),
        (["--device", "h100", "--model.width", "100"], "width"),
        (["--device", "h100", "--devices", "8", "--global_batch", "100"], "100 is not divisible .* of 128$"),
        (["--device", "h100", "--devices", "8", "--global_batch", "100", "--strategy", "ddp"], "100 is not divisible"),
        (["--device", "h100", "--reserve_gib", "100"], "reserve 100 GiB is not below the 79.1 GiB"),
        (["--device", "h100", "--recompute_blocks", "6"], "recompute_blocks is 6, but recompute is none"),
        (["--device", "h100", "--recompute", "full", "--recompute_blocks", "13"], "at most the model's 12 layers"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_before_anything_is_printed(arguments, word, capsys):
    with pytest.raises(UserError, match=word) as caught:
        main(arguments)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def result_line(**changes) -> dict:
    model = preset("big", vocab_size=50_304, context=1024)
    line = dict(tag="t", mode="ddp", size="big", world=2, accum=1, micro=16, global_batch=32, context=1024, params=model.parameters(),
                mem_gib=53.9, step_ms=278.0, precision="16-mixed", recompute="none", compile="blocks", device="NVIDIA H200")  # fmt: skip
    return {**line, **changes}


def compare(capsys, tmp_path, *lines: dict) -> list[dict]:
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return json.loads(run(capsys, *MACHINE, "--compare", str(path), "--json"))


def test_compare_finds_the_vocabulary_and_sets_memory_side_by_side(capsys, tmp_path):
    [one] = compare(capsys, tmp_path, result_line())
    predicted, measured = one["memory_gib"]
    assert measured == 53.9
    assert predicted == pytest.approx(measured, rel=0.10)
    assert one["step_ms"][1] == 278.0


def test_compare_plans_a_run_with_the_blocks_that_it_recomputed(capsys, tmp_path):
    some = dict(recompute="selective", recompute_blocks=6, precision="bf16-mixed")
    lines = [
        result_line(**some),
        result_line(**some | dict(recompute_blocks=None)),
        result_line(**some | dict(recompute_blocks=25)),
    ]
    few, all_of_them, wrong = compare(capsys, tmp_path, *lines)
    assert few["memory_gib"][0] > all_of_them["memory_gib"][0]
    assert wrong["why"].startswith("recompute_blocks is 25, but must be")
    assert "selective in 6 blocks" in run(capsys, *MACHINE, "--compare", str(tmp_path / "results.jsonl"))


def test_compare_says_why_a_line_cannot_be_compared(capsys, tmp_path):
    found = compare(
        capsys,
        tmp_path,
        result_line(mode="other"),
        result_line(status="oom"),
        result_line(precision="64-true"),
        result_line(recompute="half"),
        result_line(mem_gib=None, step_ms=None),
    )
    assert [bool(one["why"]) for one in found] == [True] * 5
    assert found[3]["why"] == "recompute half cannot be planned; none, selective, full can"
    assert "mem_gib" in found[4]["why"]
    assert found[4]["memory_gib"] is None


def test_compare_says_in_one_line_why_runs_on_a_cpu_have_no_figures(capsys, tmp_path):
    path = tmp_path / "results.jsonl"
    on_cpu = result_line(mem_gib=None, device="x86_64", precision="32-true")
    path.write_text("".join(json.dumps(on_cpu | {"tag": f"run{i}"}) + "\n" for i in range(5)))
    out = run(capsys, *MACHINE, "--compare", str(path))
    assert "run0 (ddp, big), run1 (ddp, big), run2 (ddp, big) and 2 more: memory: the run has no peak" in out
    assert out.count("no rates are known for x86_64 in 32-true") == 1


def test_compare_names_damaged_lines_and_skips_them(capsys, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(result_line()) + '\n{"tag": \n[1]\n')
    out = run(capsys, *MACHINE, "--compare", str(path))
    assert "results.jsonl:2: not JSON" in out
    assert "results.jsonl:3: no object" in out
    path.write_text("[1]\n")
    with pytest.raises(UserError, match=r"has no line that is a run \(no object\)"):
        main([*MACHINE, "--compare", str(path)])


@pytest.mark.parametrize("where", ["shape", "line"])
def test_compare_plans_a_run_of_no_preset_from_the_shape_in_its_line(capsys, tmp_path, where):
    shape = preset("big").to_dict()
    shape = {name: shape[name] for name in ("layers", "heads", "kv_heads", "width", "ff_width", "norm", "tied", "bias")}
    line = result_line(size="custom", vocab=50_304, **({"shape": shape} if where == "shape" else shape))
    [one] = compare(capsys, tmp_path, line)
    assert one["memory_gib"] == compare(capsys, tmp_path, result_line())[0]["memory_gib"]


def test_compare_says_that_a_run_of_no_preset_has_no_shape(capsys, tmp_path):
    unknown, damaged = compare(
        capsys, tmp_path, result_line(size="custom"), result_line(size="custom", layers="x", heads=1, width=8)
    )
    assert "'custom' is no preset, and the line holds no shape (layers, heads, width)" in unknown["why"]
    assert damaged["why"]


def test_compare_reads_shapes_from_the_recorded_command(capsys, tmp_path):
    model = preset("big", vocab_size=300, context=128, layers=4)
    line = result_line(
        context=128, vocab=300, params=model.parameters(), command="lit-gpt-dist fit --model.size big --model.layers 4"
    )
    [one] = compare(capsys, tmp_path, line)
    assert one["why"] == ""
