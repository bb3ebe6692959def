"""Claims about AdamW's groups and the schedules."""

import itertools

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import GPTConfig
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.optim.config import OptimConfig
from lit_gpt_dist.optim.groups import make_adamw
from lit_gpt_dist.optim.schedules import HostRates, lr_factor, warmup_length
from lit_gpt_dist.parallel.graph import make_capturable

STEPS = 1000


def test_weight_decay_is_on_matrices_only_and_every_parameter_is_in_one_group() -> None:
    model = GPT(GPTConfig(bias=True, tied=False))
    optimizer = make_adamw(model, 1e-3, OptimConfig(weight_decay=0.3), fused=None, device=torch.device("cpu"))
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in others["params"]} == {1}
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_a_matrix_without_gradient_signal_shrinks_and_a_vector_stays() -> None:
    model = GPT(GPTConfig())
    optimizer = make_adamw(model, 0.1, OptimConfig(weight_decay=0.5), fused=False, device=torch.device("cpu"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        assert torch.allclose(parameter, factor * before[name]), name


def factors(**options: object) -> list[float]:
    config = OptimConfig(**options)  # type: ignore[arg-type]
    return [lr_factor(step, config, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_schedules_rise_over_the_warm_up_to_their_peak_and_never_leave_their_bounds(schedule: str) -> None:
    curve = factors(schedule=schedule, warmup_steps=100, min_lr_ratio=0.1)
    assert curve[0] == pytest.approx(1 / 101), "the first step moves already"
    assert all(b > a for a, b in itertools.pairwise(curve[:101]))
    assert max(curve) == curve[100] == 1.0
    assert min(curve[100:]) >= 0.1


def test_cosine_ends_at_the_floor_and_is_half_way_in_the_middle() -> None:
    curve = factors(schedule="cosine", warmup_steps=0, min_lr_ratio=0.1)
    assert curve[STEPS // 2] == pytest.approx(0.55)
    assert curve[-1] == pytest.approx(0.1, abs=1e-4)
    assert lr_factor(STEPS + 50, OptimConfig(warmup_steps=0), STEPS) == pytest.approx(0.1), "and stays there beyond it"


def test_wsd_is_flat_until_its_last_part_and_falls_linearly() -> None:
    curve = factors(schedule="wsd", warmup_steps=10, decay_share=0.2, min_lr_ratio=0.0)
    assert set(curve[10:801]) == {1.0}
    assert curve[900] == pytest.approx(0.5)
    assert curve[-1] == pytest.approx(1 / 200)


def test_warm_up_is_long_by_default_and_at_most_half_of_the_run() -> None:
    assert warmup_length(OptimConfig(), 20_000) == 400
    assert warmup_length(OptimConfig(), 2_000) == 100
    assert warmup_length(OptimConfig(), 50) == 25
    assert warmup_length(OptimConfig(warmup_steps=0), 50) == 0


@pytest.mark.parametrize(
    "options",
    [
        dict(lr=0.0),
        dict(lr=float("nan")),
        dict(warmup_steps=-1),
        dict(schedule_steps=0),
        dict(min_lr_ratio=1.5),
        dict(beta1=1.0),
        dict(schedule="linear"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        OptimConfig(**options)


@pytest.mark.parametrize("recorded", [False, True])
def test_rates_are_those_of_torchs_scheduler_and_on_a_device_written_once_for_both_groups(recorded: bool) -> None:
    device = torch.device("cpu")
    pairs = []
    for kind in (LambdaLR, HostRates):
        optimizer = make_adamw(GPT(GPTConfig()), 1e-3, OptimConfig(), fused=None, device=device)
        pairs.append((optimizer, kind(optimizer, lambda step: lr_factor(step, OptimConfig(), STEPS))))
    (plain, plain_schedule), (optimizer, schedule) = pairs
    if recorded:
        make_capturable(optimizer, device)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert not recorded or first is second
    for _ in range(150):  # through the warm-up and into the decay
        plain_schedule.step()
        schedule.step()
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(
            [group["lr"] for group in plain.param_groups], rel=1e-6 if recorded else 0
        )
    assert schedule.get_last_lr() == plain_schedule.get_last_lr()
    assert schedule.state_dict()["last_epoch"] == plain_schedule.state_dict()["last_epoch"] == 150
    assert not recorded or optimizer.param_groups[0]["lr"] is first, (
        "a recorded update reads the tensor it was recorded with"
    )
