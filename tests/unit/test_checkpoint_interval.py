import pytest

from lit_gpt_dist.checkpoint.interval import advice, best_interval_seconds, lost_share


def test_interval_is_youngs_formula():
    assert best_interval_seconds(2.0, 3600.0) == pytest.approx(120.0)  # √(2 · 2 · 3600)


def test_no_other_interval_loses_less():
    save, failure = 3.0, 10 * 3600.0
    best = best_interval_seconds(save, failure)
    least = lost_share(best, save, failure)
    assert all(lost_share(best * factor, save, failure) > least for factor in (0.5, 0.9, 1.1, 2.0))


def test_advice_names_seconds_steps_and_cost():
    assert "save every 120 s, which is every 240 steps" in advice(2.0, 1.0, 0.5)
    assert "3.33% of the time" in advice(2.0, 1.0, 0.5)


@pytest.mark.parametrize("arguments", [(-1.0, 1.0), (1.0, 0.0)])
def test_impossible_times_are_refused(arguments):
    with pytest.raises(ValueError, match="must be"):
        best_interval_seconds(*arguments)
