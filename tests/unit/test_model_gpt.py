"""Claims about the model alone: shapes, parameters, FLOPs, positions, attention, generation with a cache."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.generate import choose, generate_tokens
from lit_gpt_dist.model import gpt
from lit_gpt_dist.model.config import PRESETS, GPTConfig, preset
from lit_gpt_dist.model.flops import flops_per_token, model_flops_utilization
from lit_gpt_dist.model.gpt import GPT, compiled_cross_entropy, cross_entropy, rotary_phases, rotate
from lit_gpt_dist.model.init import initialize

SMALL = GPTConfig(layers=2, heads=4, width=32, context=16, vocab_size=50)
LLAMA = replace(SMALL, kv_heads=2, norm="rmsnorm", positions="rope", activation="swiglu", tied=False, ff_width=0)
BIASED = replace(SMALL, bias=True, tied=False, activation="swiglu", ff_width=48)
SHAPES = {"gpt-2": SMALL, "llama": LLAMA, "biased": BIASED}


def make(config: GPTConfig, dtype: torch.dtype = torch.float64) -> GPT:
    model = GPT(config)
    initialize(model, seed=3)
    return model.to(dtype).eval()


def some_tokens(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, (batch, count), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_parameters_are_counted_as_they_are_built(config: GPTConfig) -> None:
    assert sum(parameter.numel() for parameter in GPT(config).parameters()) == config.parameters()


@pytest.mark.parametrize(("size", "millions"), [("baby", 10.7), ("gpt2", 85.2), ("big", 1208.6), ("gpt2-124m", 124.4)])
def test_presets_have_their_known_size(size: str, millions: float) -> None:
    config = preset(size)
    vocabulary = 0 if "vocab_size" in PRESETS[size] else config.vocab_size * config.width  # the corpus's own
    assert (config.parameters() - vocabulary) / 1e6 == pytest.approx(millions, abs=0.1)


def test_flops_per_token_are_the_formulas() -> None:
    """facts: 6N; PaLM 6N + 12·L·h·s; half attention 6N + 6·L·h·s. N: matmul weights with the head, without embeddings."""
    config = preset("gpt2-124m")
    weights = 12 * 12 * 768**2 + 50_304 * 768
    assert config.matmul_parameters() == weights
    flops = flops_per_token(config)
    attention = 12 * 768 * 1024
    assert flops == (6 * weights, 6 * weights + 12 * attention, 6 * weights + 6 * attention)


def test_mfu_check_value_of_a_7b_model() -> None:
    """facts: 7B, 2M tokens in 8.5 s on 64 cards of 989 TFLOP/s, 6N: 15.6%."""
    assert model_flops_utilization(6 * 7e9, 2e6 / 8.5, 989e12, 64) == pytest.approx(0.156, abs=5e-4)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_token_sees_only_what_stands_before_it(config: GPTConfig) -> None:
    model, tokens = make(config), some_tokens(12)
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_loss_is_the_mean_over_windows_and_near_the_uniform_one_at_first(config: GPTConfig) -> None:
    model, windows = make(config), some_tokens(13, batch=3)
    loss = model(windows[:, :-1], windows[:, 1:]).detach()
    by_window = model(windows[:, :-1], windows[:, 1:], "window")
    assert by_window.shape == (3,)
    assert float(loss) == pytest.approx(float(by_window.mean()), rel=1e-12)
    assert float(loss) == pytest.approx(torch.tensor(50.0).log().item(), abs=0.2)


def test_rope_makes_attention_a_function_of_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, LLAMA.head_width, generator=generator, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        cosine, sine = rotary_phases(torch.tensor([query_at, key_at]), LLAMA, torch.float64)
        turned = rotate(torch.stack((query, key))[None, None], (cosine, sine))[0, 0]
        return float(turned[0] @ turned[1])

    assert score(5, 3) == pytest.approx(score(12, 10), rel=1e-12)
    assert abs(score(5, 3) - score(5, 4)) > 1e-3


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_cached_generation_equals_the_full_forward(config: GPTConfig) -> None:
    model, tokens = make(config), some_tokens(14)
    caches = model.make_caches(1, torch.float64)
    pieces = [model(tokens[:, :5], caches=caches)] + [model(tokens[:, t : t + 1], caches=caches) for t in range(5, 14)]
    assert torch.allclose(torch.cat(pieces, dim=1), model(tokens), rtol=0, atol=1e-12)  # sums in another order


def test_greedy_generation_takes_the_likeliest_token_of_the_full_forward() -> None:
    model, prompt = make(LLAMA), some_tokens(4)[0]
    expected = prompt.tolist()
    for _ in range(10):
        expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    assert list(generate_tokens(model, prompt, 10, temperature=0)) == expected[4:]


def test_generation_goes_on_beyond_the_context() -> None:
    model = make(SMALL)
    tokens = list(generate_tokens(model, some_tokens(30)[0], 40, temperature=1.0))
    assert len(tokens) == 40
    assert all(0 <= token < 50 for token in tokens)


def test_generation_is_decided_by_its_seed_and_leaves_a_model_in_training_in_training() -> None:
    model, prompt = make(SMALL).train(), some_tokens(4)[0]
    first, again, other = (list(generate_tokens(model, prompt, 20, temperature=1.0, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert model.training


def draws(logits: torch.Tensor, count: int = 400, **options: float | int | None) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    options = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    return {choose(logits, generator=generator, **options) for _ in range(count)}  # type: ignore[arg-type]


def test_top_k_and_top_p_leave_only_the_likeliest_tokens() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert draws(logits) == {0, 1, 2, 3}
    assert draws(logits, top_k=2) == {1, 2}
    assert draws(logits, top_p=0.5) == {1}
    assert draws(logits, top_p=0.6) == {1, 2}, "the smallest set that reaches p"
    assert draws(logits, top_p=1.0) == {0, 1, 2, 3}
    assert draws(logits, temperature=0) == {1}
    assert draws(logits, temperature=0.05) == {1}


def test_rows_beyond_the_vocabulary_are_never_generated() -> None:
    model, prompt = make(SMALL), some_tokens(4)[0].clamp(max=9)
    assert max(generate_tokens(model, prompt, 60, temperature=5.0, vocabulary_size=10)) < 10


def test_residual_projections_start_smaller_by_the_root_of_twice_the_layers() -> None:
    model = make(preset("tiny", width=256, heads=4, vocab_size=500), torch.float32)
    block = model.blocks[0]
    assert float(model.embedding.weight.std()) == pytest.approx(0.02, rel=0.02)
    assert float(block.attention.query_key_value.weight.std()) == pytest.approx(0.02, rel=0.02)
    for projection in (block.attention.output, block.feed_forward.down):
        assert float(projection.weight.std()) == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.02)
    assert torch.equal(block.attention_norm.weight, torch.ones(256))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(heads=5), "not divisible"),
        (dict(kv_heads=3), "does not divide"),
        (dict(layers=0), "at least 1"),
        (dict(positions="rope", width=12, heads=4), "odd"),
        (dict(norm="batchnorm"), "is not one of"),
        (dict(dropout=1.0), "dropout"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        replace(SMALL, **({"kv_heads": 0} | change))


def test_logits_that_are_not_finite_choose_no_token() -> None:
    with pytest.raises(UserError, match="not finite"):
        choose(torch.tensor([0.0, torch.nan]), 1.0, None, None, torch.Generator())


@pytest.mark.parametrize("vocabulary", [48, 50])  # with rows that need no padding, and some that do
@pytest.mark.parametrize("reduction", ["mean", "window"])
def test_the_loss_written_for_the_compiler_has_the_value_and_gradients_of_the_usual_one(
    vocabulary: int, reduction: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    x, head = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 7, 16), (vocabulary, 16))
    )
    targets = torch.randint(0, vocabulary, (3, 7), generator=generator)
    found = []
    for loss_of in (
        lambda x, head: compiled_cross_entropy(x, head, targets, reduction),
        lambda x, head: cross_entropy(x @ head.T, targets, reduction),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, head)]
        loss = loss_of(*inputs)
        found.append((loss.detach(), *torch.autograd.grad(loss.sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_with_dropout_nothing_that_draws_random_numbers_is_kept_by_selective_recomputation():
    """What is kept does not run again, and what follows would draw what it drew."""
    kept = [op for op in gpt.PRODUCTS | gpt.ATTENTIONS if gpt.keeps_products(None, op) is CheckpointPolicy.MUST_SAVE]
    assert set(kept) == gpt.PRODUCTS
    assert not any(torch.Tag.nondeterministic_seeded in op.tags for op in kept)
    random = [op for op in gpt.ATTENTIONS if torch.Tag.nondeterministic_seeded in op.tags]
    assert random, "attention draws where it drops"
