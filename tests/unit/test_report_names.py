"""Runs that differ in their vocabulary, corpus, context or shape can be told apart on every page."""

from lit_gpt_dist.model.config import preset
from lit_gpt_dist.report.compare import compare_all
from lit_gpt_dist.report.curves import join_curves
from lit_gpt_dist.report.names import corpus_names, describe_size
from lit_gpt_dist.report.results import Run
from lit_gpt_dist.report.statistics import group_cases
from lit_gpt_dist.report.tables import curve_table, speed_table


def run(**fields):
    plain = dict(size="tiny", context=64, vocab=65, params=10, corpus="/data/a.txt", corpus_hash="aaaa", seed=1)
    return Run("f:1", "run", "single", world=1, micro=16, accum=1, global_batch=16, losses=(1.0,), **(plain | fields))


RUNS = [run(), run(vocab=256, params=20), run(context=32, params=30), run(corpus="/data/b.txt", corpus_hash="bbbb")]


def test_a_whole_shape_is_described_by_what_the_preset_does_not_have():
    shape = preset("tiny", vocab_size=65, dropout=0.1).to_dict()
    assert describe_size(run(shape=shape)) == "tiny"
    assert describe_size(run(shape=preset("tiny", layers=3).to_dict())) == "tiny (layers 3)"
    assert describe_size(run(shape=preset("tiny", width=128).to_dict())) == "tiny (width 128)"
    assert describe_size(run(shape=preset("tiny", ff_width=100).to_dict())) == "tiny (ff_width 100)"
    assert describe_size(run(shape={"layers": 3})) == "tiny (layers 3)"


def test_another_shape_of_as_many_parameters_is_another_case():
    shape = preset("tiny").to_dict()
    assert len(group_cases([run(shape=shape), run(), run(shape=preset("tiny", heads=4).to_dict())])) == 2


def test_a_run_with_dropout_is_another_case_and_says_so():
    assert [case.options for case in group_cases([run(dropout=0.0), run(), run(dropout=0.1)])] == [
        "32-true",
        "32-true, dropout 0.1",
    ]


def test_rows_of_the_speed_table_tell_vocabulary_context_and_corpus():
    shown = speed_table(group_cases(RUNS)).without_empty_columns()
    places = [shown.headers.index(name) for name in ("context", "vocabulary", "corpus")]
    assert [[row[i] for i in places] for row in shown.rows] == [
        ["64", "65", "a.txt, b.txt"],
        ["64", "256", "a.txt"],
        ["32", "65", "a.txt"],
    ]
    narrow = shown.narrowed_to(80)
    assert {"context", "vocabulary", "corpus"} <= {*narrow.headers}
    assert not {"vocabulary", "corpus"} & {*speed_table(group_cases(RUNS[:1])).without_empty_columns().headers}


def test_rows_of_the_curve_table_tell_what_makes_another_experiment():
    shown = curve_table(compare_all(join_curves([*RUNS, run(seed=2)]))).without_empty_columns()
    assert len(shown.rows) == len({tuple(row) for row in shown.rows}) == 5
    assert {"context", "vocabulary", "corpus", "seed"} <= {*shown.headers}
    assert "size" not in shown.headers


def test_corpora_of_one_name_carry_their_hash():
    twins = [run(), run(corpus="/other/a.txt", corpus_hash="cccccccccc"), run(corpus="b.txt", corpus_hash="bbbb")]
    assert corpus_names(twins) == {"aaaa": "a.txt aaaa", "cccccccccc": "a.txt cccccccc", "bbbb": "b.txt"}
