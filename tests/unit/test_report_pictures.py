"""Pictures: one look a strategy everywhere, panels only of what can be compared, and nothing lost without a word."""

from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from lit_gpt_dist.report.compare import compare_all
from lit_gpt_dist.report.curves import join_curves
from lit_gpt_dist.report.loss_pictures import MOST_PICTURES, draw_losses
from lit_gpt_dist.report.panels import arrange, left_out
from lit_gpt_dist.report.picture import COLOURS, STRATEGIES, strategy_looks
from lit_gpt_dist.report.results import Run
from lit_gpt_dist.report.scaling_pictures import draw_scaling
from lit_gpt_dist.report.statistics import group_cases

LOSSES = tuple(4.0 - 0.01 * i for i in range(10))


def run(mode="single", world=1, micro=16, accum=1, size="baby", tok_s=None, **fields):
    batch = micro * accum * world
    fields = dict(context=64, params=10, device="NVIDIA H200", mem_gib=2.0, losses=LOSSES, seed=1) | fields
    tag = f"{size}-{mode}-{world}-{micro}-{accum}"
    rate = tok_s or 90.0 * world
    return Run("f:1", tag, mode, size, world, micro, accum, batch, tok_s=rate, step_ms=batch * 64e3 / rate, **fields)


def matrix(size="baby", accumulate=(1, 4), worlds=(1, 2), strategies=("ddp", "fsdp2"), **fields):
    return [
        run(mode, world, accum=accum, size=size, **fields)
        for accum in accumulate
        for mode, counts in [("single", (1,)), *((name, worlds) for name in strategies)]
        for world in counts
    ]


def draw(runs):
    cases = group_cases(runs)
    looks = strategy_looks(case.first.mode for case in cases)
    return [*draw_scaling(cases, looks), *draw_losses(compare_all(join_curves(runs)), looks)]


def drawn_looks(pictures):
    """(colour, marker) of everything drawn with a marker, on all axes."""
    found = set()
    for picture in pictures:
        for axis in picture.figure.axes:
            found |= {
                (to_hex(line.get_color()).upper(), line.get_marker())
                for line in axis.lines
                if line.get_marker() not in ("", "None", None)
            }
    return found


def test_a_strategy_has_one_look_over_all_axes_of_all_pictures():
    runs = [
        *matrix(strategies=("ddp", "fsdp2", "own")),
        *matrix("big", strategies=("fsdp2",))[1:],  # without `single`: the first line of its panel is fsdp2
        run("other", 2, accum=4, losses=LOSSES),
    ]
    pictures = draw(runs)
    assert {p.name.split("_")[0] for p in pictures} == {"tokens", "efficiency", "memory", "loss"}
    looks = strategy_looks(r.mode for r in runs)
    expected = {(looks[r.mode]["color"].upper(), looks[r.mode]["marker"]) for r in runs}
    assert drawn_looks(pictures) == expected
    assert len(expected) == len({r.mode for r in runs})
    for picture in pictures:
        for handle in picture.figure.legends[0].legend_handles:
            label = handle.get_label()
            if (mode := label.split(" on ")[0]) in looks:
                assert (handle.get_color(), handle.get_marker()) == (looks[mode]["color"], looks[mode]["marker"])


def test_looks_of_known_strategies_never_change_and_unknown_ones_follow_by_name():
    known, more = strategy_looks([]), strategy_looks(["zeta", "ddp", "alpha"])
    assert all(more[name] == known[name] for name in STRATEGIES)
    assert strategy_looks(["alpha", "zeta"]) == more
    assert more["alpha"]["color"] == COLOURS[len(STRATEGIES)]
    triples = {(look["color"], look["marker"], str(look["linestyle"])) for look in more.values()}
    assert len(triples) == len(more)


def test_a_model_has_one_panel_with_its_batches_in_it():
    runs = [r for i, size in enumerate(("baby", "gpt2", "big")) for r in matrix(size, params=10 + i)]
    panels = arrange(group_cases(runs))
    assert [panel.first.size for panel in panels] == ["baby", "gpt2", "big"]
    assert [[group.batch for group in panel.groups] for panel in panels] == [["16 × 1", "16 × 4"]] * 3
    axes = draw(runs)[0].figure.axes
    assert len(axes) == 3
    assert "○" in axes[0].get_title()
    assert "●" in axes[0].get_title()


def test_points_that_cannot_be_compared_get_no_panel_and_are_named():
    lonely = [
        *(run(mode, 2, micro=8, size="gpt2") for mode in ("ddp", "fsdp2")),  # one number of cards
        run("ddp", 2, micro=4, size="big"),
        run("fsdp2", 4, micro=4, size="big"),  # two numbers, but neither one card nor one strategy
    ]
    cases = group_cases([*matrix(), *lonely])
    panels = arrange(cases)
    assert [panel.first.size for panel in panels] == ["baby"]
    assert left_out(cases, panels) == ["big, 32-true, 4 × 1 on 2, 4", "gpt2, 32-true, 8 × 1 on 2"]
    (speed, *_) = draw([*matrix(), *lonely])
    assert speed.note == "Only in the table: big, 32-true, 4 × 1 on 2, 4; gpt2, 32-true, 8 × 1 on 2."
    assert all(picture.name.startswith("loss") for picture in draw(lonely))


def test_cases_of_a_weak_matrix_that_share_a_global_batch_by_chance_get_no_panel():
    panels = arrange(group_cases(matrix(worlds=(1, 2, 4))))  # 16 × 4 on one card and 16 × 1 on four are 64 windows
    assert [panel.weak for panel in panels] == [True]


def test_a_strong_matrix_has_a_panel_of_its_global_batch():
    runs = [run()] + [run(mode, world, accum=4 // world) for mode in ("single", "ddp") for world in (1, 2, 4)]
    (panel,) = arrange(group_cases([r for r in runs if r.mode != "single" or r.accum == 4]))
    assert (panel.weak, [group.batch for group in panel.groups], panel.worlds) == (False, ["64"], [1, 2, 4])


def test_strategies_that_are_compiled_each_in_its_own_way_share_a_panel():
    """As ``auto`` does it: the whole model on one card, blocks under fsdp2."""
    for units, way in (("blocks", "blocks"), ("model", "model")):
        runs = [
            replace(r, compile=way, record={"units": units}) if r.mode == "fsdp2" else replace(r, compile="model")
            for r in matrix()
        ]
        (panel,) = arrange(group_cases(runs))
        assert {case.first.mode for case in panel.cases} == {"single", "ddp", "fsdp2"}
        assert panel.setting == "baby, context 64, 32-true, compile"


def test_compilations_that_were_compared_have_panels_of_their_own():
    runs = [replace(r, compile=way) for way in ("model", "blocks") for r in matrix()]
    settings = [panel.setting for panel in arrange(group_cases(runs))]
    assert settings == ["baby, context 64, 32-true, compile blocks", "baby, context 64, 32-true, compile model"]


def test_equal_sizes_of_several_contexts_and_devices_can_be_told_apart():
    runs = [*matrix(), *matrix(context=128), *matrix(device="NVIDIA A100")]
    titles = [axis.get_title() for axis in draw(runs)[0].figure.axes]
    assert len(titles) == len(set(titles)) == 3
    assert any("A100" in title for title in titles)


def test_no_axis_is_empty_where_a_panel_has_nothing_to_show():
    without_base = [run("ddp", world, size="big", params=20) for world in (2, 4)]
    speed, efficiency, *_ = draw([*matrix(), *without_base])
    assert (len(speed.figure.axes), len(efficiency.figure.axes)) == (2, 1)


def test_memory_of_a_cpu_is_drawn_beside_that_of_cards():
    cpu = [replace(r, device="cpu", mem_gib=None, host_gib=0.5) for r in matrix("tiny", params=5)]
    memory = next(p for p in draw([*matrix(), *cpu]) if p.name == "memory")
    assert [axis.get_ylabel() for axis in memory.figure.axes] == ["GiB per process (host)", "GiB per card"]


def test_the_ideal_and_full_efficiency_are_the_same_one_card_run():
    """A lucky ddp on one card does not raise the ideal above the base of the efficiencies."""
    runs = [run(tok_s=100.0), run("ddp", 1, tok_s=110.0), run("ddp", 2, tok_s=180.0)]
    (panel,) = arrange(group_cases(runs))
    assert panel.groups[0].one_card.tok_s == 100.0


def test_pictures_of_many_panels_say_which_are_missing():
    runs = [r for i in range(10) for r in matrix(f"size-{i}", params=10 + i)]
    speed = draw(runs)[0]
    assert len(speed.figure.axes) == 8
    assert "size-9, 32-true, 16 × 1 on 1, 2" in speed.note
    losses = [p for p in draw(runs) if p.name.startswith("loss")]
    assert len(losses) == MOST_PICTURES
    assert "more references have curves" in losses[-1].note


@pytest.mark.parametrize("name", ["a$b", "$x^{$", "_hidden", "with/slash"])
def test_odd_names_are_drawn_as_they_are(name, tmp_path):
    runs = [replace(r, tag=name, size=name, mode=name if r.world == 2 else r.mode) for r in matrix()]
    for picture in draw(runs):
        (tmp_path / f"{picture.name}.png").write_bytes(picture.png(40))
    speed, *_, loss = draw(runs)
    assert any(name in text.get_text().replace(r"\$", "$") for text in speed.figure.legends[0].get_texts())
    assert any(name in text.get_text().replace(r"\$", "$") for text in loss.figure.legends[0].get_texts())


def test_the_lower_picture_of_losses_shows_the_largest_difference_so_far():
    other = run("ddp", 2, accum=2, losses=tuple(x + (0.05 if i == 3 else 0.001) for i, x in enumerate(LOSSES)))
    picture = next(p for p in draw([run(accum=4), other]) if p.name.startswith("loss"))
    (line,) = [line for line in picture.figure.axes[1].lines if line.get_marker() == "s"]
    assert list(line.get_ydata()) == pytest.approx([0.001] * 3 + [0.05] * 7)
