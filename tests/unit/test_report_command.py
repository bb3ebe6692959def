"""The whole `report` command on synthetic results: files, messages, exit codes."""

import json
import re
from xml.etree import ElementTree

import pytest

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.report.command import main


def record(tag, mode, world, accum, tok_s, losses, **fields):
    tokens = 16 * accum * world * 64
    return (
        dict(
            **dict(
                tag=tag, mode=mode, size="tiny", world=world, accum=accum, micro=16, global_batch=16 * accum * world
            ),
            **dict(context=64, step_ms=tokens / tok_s * 1000, tok_s=tok_s, losses=losses, seed=1, corpus_hash="abc"),
            **dict(
                params=10, tokens_per_step=tokens, precision="32-true", device="cpu", host_gib=0.5, git_revision="beef"
            ),
        )
        | fields
    )


@pytest.fixture
def results(tmp_path):
    curve = [4.0 - 0.05 * i for i in range(10)]
    lines = [record("one", "single", 1, 4, 1000.0, curve), record("ddp|2", "ddp", 2, 2, 1900.0, curve)]
    lines += [record("ddp-4", "ddp", 4, 1, 3600.0, [loss + 0.05 for loss in curve], mfu=0.5)]
    lines += [
        dict(
            tag="huge",
            mode="ddp",
            size="big",
            world=2,
            accum=1,
            micro=4,
            status="oom",
            error="[bold]CUDA out of memory",
        )
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"tag": "cut off\n')
    (tmp_path / "environment.json").write_text(json.dumps({"driver": "999.1"}))
    return path


def test_the_terminal_shows_verdicts_out_of_memory_and_damaged_lines(results, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    assert main([str(results)]) == 0
    out = capsys.readouterr().out
    for words in (
        "same curve",
        "different run",
        "4 ranks share data",
        "OOM",
        f"{results}:5: not JSON",
        "90.0%",
        "3.60×",
    ):
        assert words in out
    assert sorted(p.name for p in results.parent.iterdir()) == ["environment.json", "results.jsonl"]


def test_every_format_is_written_and_the_page_needs_no_network(results, tmp_path):
    out = tmp_path / "out"
    assert main([str(results), "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "data:image/svg+xml;base64," in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "driver: 999.1" in page
    assert "beef" in page
    markdown = (out / "report.md").read_text()
    for name in re.findall(r"\]\((pictures/[^)]+)\)", markdown):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "ddp\\|2" in markdown
    for picture in (out / "pictures").glob("*.svg"):
        ElementTree.parse(picture)
    names = {p.stem for p in (out / "pictures").iterdir()}
    assert names == {"tokens_per_second", "efficiency", "memory", "loss_1_tiny_batch64"}
    assert (out / "speed.csv").read_text().count("\n") == 5
    assert len((out / "curves.csv").read_text().splitlines()) == 4


def test_only_the_formats_asked_for_are_written(results, tmp_path):
    main([str(results), "--out", str(tmp_path / "out"), "--format", "csv"])
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"speed.csv", "curves.csv"}


def test_a_markdown_page_carries_its_pictures_in_a_folder_of_its_name(results, tmp_path):
    page = tmp_path / "docs" / "results.md"
    main([str(results), "--markdown", str(page), "--title", "Ours"])
    assert page.read_text().startswith("# Ours\n")
    assert (tmp_path / "docs" / "results" / "efficiency.png").exists()
    assert "(results/efficiency.png)" in page.read_text()


def test_the_same_results_give_the_same_files(results, tmp_path):
    for name in ("a", "b"):
        main([str(results), "--out", str(tmp_path / name)])
    for path in (tmp_path / "a").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_tensorboard_gets_the_pictures(results, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    main([str(results), "--tensorboard", str(tmp_path / "board")])
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert "report/tokens_per_second" in events.Tags()["images"]


def test_mistakes_are_named_with_a_remedy(results, tmp_path):
    with pytest.raises(UserError, match=r"format 'pdf' is not one of"):
        main([str(results), "--format", "pdf"])
    with pytest.raises(UserError, match=r"no run with losses is tagged 'huge'"):  # it ran out of memory
        main([str(results), "--reference", "huge"])
    with pytest.raises(UserError, match=r"no run with losses is tagged 'two'; use one of"):
        main([str(results), "--reference", "two"])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(UserError, match="no usable line"):
        main([str(empty)])


def test_two_thousand_lines_with_damage_are_all_read(tmp_path, capsys):
    lines = [
        json.dumps(record(f"run-{i}", "ddp", 2, 2, 1000.0 + i, [4.0 - 0.01 * k for k in range(50)]))
        for i in range(1999)
    ]
    path = tmp_path / "results.jsonl"
    path.write_text(
        "\n".join([json.dumps(record("one", "single", 1, 4, 600.0, [4.0 - 0.01 * k for k in range(50)])), *lines, "{"])
    )
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert "1999 × same curve" in capsys.readouterr().out
    assert len((tmp_path / "out" / "curves.csv").read_text().splitlines()) == 2001


def test_results_without_any_losses_say_so(tmp_path, capsys):
    lost = dict(
        tag="a", mode="ddp", size="big", world=2, accum=1, micro=4, status="failed", error="File x, in <module>"
    )
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(lost))
    assert main([str(path), "--markdown", str(tmp_path / "page.md")]) == 0
    assert "No run has losses." in capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "## One curve?\n\nNo run has losses." in page
    assert "in &lt;module>" in page


def test_what_the_pictures_leave_out_stands_on_both_pages(results, tmp_path):
    with results.open("a") as file:
        file.write("\n" + json.dumps(record("lonely", "ddp", 2, 8, 500.0, [4.0])))
    main([str(results), "--out", str(tmp_path / "out")])
    for name in ("report.md", "report.html"):
        assert "Only in the table: tiny, 32-true, 16 × 8 on 2." in (tmp_path / "out" / name).read_text()
