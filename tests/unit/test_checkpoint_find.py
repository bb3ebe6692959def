import json
import os

import pytest
from checkpoint_helpers import write_checkpoint

from lit_gpt_dist.checkpoint import find, retention
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.format import DamagedError, Manifest
from lit_gpt_dist.checkpoint.retention import Keep, superfluous
from lit_gpt_dist.errors import UserError

OTHER_RUN = "b" * 32


def part_of(folder):
    return next(folder.glob("*.distcp"))


def flip_a_byte(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "a byte of a part flipped": lambda f: flip_a_byte(part_of(f)),
    "a byte of the state flipped": lambda f: flip_a_byte(f / layout.STATE_FILE),
    "a byte of the metadata flipped": lambda f: flip_a_byte(f / ".metadata"),
    "a digit of the manifest changed": lambda f: (f / "manifest.json").write_text(
        (f / "manifest.json").read_text().replace('"step": 20', '"step": 21')
    ),
    "a part missing": lambda f: part_of(f).unlink(),
    "a part cut short": lambda f: os.truncate(part_of(f), part_of(f).stat().st_size - 1),
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "an empty manifest": lambda f: (f / "manifest.json").write_text(""),
}


def test_a_whole_checkpoint_verifies(tmp_path):
    folder = write_checkpoint(tmp_path, 10)
    assert find.verify(folder).step == 10
    assert find.choose(folder) == (folder, [])


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_named_and_the_previous_one_taken(tmp_path, damage):
    good = write_checkpoint(tmp_path, 10)
    bad = write_checkpoint(tmp_path, 20)
    DAMAGE[damage](bad)
    with pytest.raises(DamagedError):
        find.verify(bad)
    path, warnings = find.newest_good(tmp_path)
    assert path == good
    assert len(warnings) == 1
    assert str(bad) in warnings[0]
    with pytest.raises(UserError, match=f"{bad} is damaged: .*newest whole one is {good}"):
        find.choose(bad)


def test_every_single_byte_counts(tmp_path):
    """All files of the folder, a byte in each of many places: no flip goes unseen."""
    folder = write_checkpoint(tmp_path, 20)
    for file in folder.iterdir():
        original = file.read_bytes()
        for at in range(0, len(original), max(1, len(original) // 25)):
            flip_a_byte(file, at)
            with pytest.raises(DamagedError):
                find.verify(folder)
            file.write_bytes(original)
    find.verify(folder)


def test_last_is_none_before_the_first_checkpoint_and_an_error_when_none_is_whole(tmp_path):
    assert find.resolve("last", tmp_path) is None
    folder = write_checkpoint(tmp_path, 10)
    assert find.resolve("last", tmp_path) == str(tmp_path / "checkpoints" / "last")
    part_of(folder).unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        find.choose(tmp_path / "checkpoints" / "last")


def test_last_keeps_to_the_runs_of_a_tag_and_names_the_newer_one_it_passes_over(tmp_path):
    ours = write_checkpoint(tmp_path, 10, tag="a")
    theirs = write_checkpoint(tmp_path, 20, run_id=OTHER_RUN, tag="b")
    path, (line,) = find.choose(tmp_path / "checkpoints" / "last", {"another tag": find.of_tag("a")})
    assert path == ours
    assert line == f"{theirs} is newer, but of another tag (--ckpt_path {theirs} takes it)"
    assert find.choose(tmp_path / "checkpoints" / "last", {"another tag": find.of_tag("b")}) == (theirs, [])
    assert find.choose(tmp_path / "checkpoints" / "last") == (theirs, [])
    assert find.resolve("last", tmp_path, "c") is None
    assert f"no checkpoint of tag c in {tmp_path} yet (--ckpt_path {theirs}" in find.none_yet(tmp_path, "c")
    part_of(ours).unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):  # not another run's instead
        find.choose(tmp_path / "checkpoints" / "last", {"another tag": find.of_tag("a")})


def test_a_checkpoint_that_does_not_tell_its_tag_may_be_anyones(tmp_path):
    unknown = write_checkpoint(tmp_path, 10)
    assert find.resolve("last", tmp_path, "a") == str(tmp_path / "checkpoints" / "last")
    assert find.choose(tmp_path / "checkpoints" / "last", {"another tag": find.of_tag("a")}) == (unknown, [])


def test_where_nothing_fits_the_newest_is_taken_to_be_refused_by_name(tmp_path):
    write_checkpoint(tmp_path, 10)
    newest = write_checkpoint(tmp_path, 20)
    assert find.newest_good(tmp_path, {"another model": lambda document: False}) == (newest, [])


def test_a_wrong_path_offers_the_newest_whole_one(tmp_path):
    folder = write_checkpoint(tmp_path, 10)
    with pytest.raises(UserError, match=f"does not exist; the newest whole one is {folder}"):
        find.resolve(tmp_path / "checkpoints" / "step-00000099", tmp_path)


def test_unfinished_folders_are_never_seen(tmp_path):
    folder = write_checkpoint(tmp_path, 10)
    unfinished = layout.temporary_folder(folder, "a" * 32)
    unfinished.mkdir()
    (folder.parent / "step-00000099.tmp").mkdir()
    assert [found.path for found in find.list_checkpoints(tmp_path)] == [folder]
    layout.sweep_temporary(folder.parent, OTHER_RUN)
    assert unfinished.exists()  # another run may be writing it
    layout.sweep_temporary(folder.parent, "a" * 32)
    assert not unfinished.exists()


def test_a_damaged_checkpoint_gives_way_to_the_same_step_of_the_same_run(tmp_path):
    write_checkpoint(tmp_path, 10)
    folder = write_checkpoint(tmp_path, 20)
    flip_a_byte(part_of(folder))
    again = write_checkpoint(tmp_path, 20)
    assert again == folder
    find.verify(again)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["last", "step-00000010", "step-00000020"]


def test_another_runs_folder_of_the_same_step_is_left_alone(tmp_path):
    theirs = write_checkpoint(tmp_path, 10, run_id=OTHER_RUN)
    before = (theirs / "manifest.json").read_text()
    ours = write_checkpoint(tmp_path, 10)
    assert ours.name == "step-00000010-aaaaaaaa"
    assert (theirs / "manifest.json").read_text() == before
    assert find.newest_good(tmp_path)[0] == ours
    assert os.readlink(ours.parent / "last") == ours.name


def test_retention_deletes_only_this_runs_whole_and_superfluous_ones(tmp_path):
    theirs = write_checkpoint(tmp_path, 1, run_id=OTHER_RUN)
    ours = [
        write_checkpoint(tmp_path, step, val_loss=loss) for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5))
    ]
    damaged = write_checkpoint(tmp_path, 5)
    (damaged / "manifest.json").write_text("{}")
    stranger = ours[0].parent / "notes"
    stranger.mkdir()
    gone = retention.enforce(ours[0].parent, "a" * 32, Keep(last=1, best=True), set())
    assert sorted(gone) == [ours[0], ours[2]]  # 40 is the last, 20 the best
    assert all(path.exists() for path in (theirs, ours[1], ours[3], damaged, stranger))
    assert not list(ours[0].parent.glob(".tmp-*"))


def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(tmp_path):
    """Else the last whole one would go for its sake."""
    old, broken, new = (write_checkpoint(tmp_path, step) for step in (5, 8, 12))
    data = next(path for path in sorted(broken.iterdir()) if path.suffix == ".distcp")
    data.write_bytes(bytes(len(data.read_bytes())))
    trusted = {new}
    assert retention.enforce(new.parent, "a" * 32, Keep(last=2), trusted) == []
    assert trusted == {new}
    newest = write_checkpoint(tmp_path, 16)
    assert retention.enforce(new.parent, "a" * 32, Keep(last=2), trusted | {newest}) == [old, broken]


def manifests(*steps_and_losses):
    return [Manifest("r", step, float(i), loss, {}) for i, (step, loss) in enumerate(steps_and_losses)]


def test_the_newest_are_kept_by_time_not_by_step():
    """A run that went back to an earlier checkpoint saves smaller steps later."""
    went_back = manifests((10, None), (20, None), (15, None))
    assert [m.step for m in superfluous(went_back, Keep(last=1))] == [10, 20]


def test_keep_every_and_best_add_to_keep_last():
    run = manifests((100, 3.0), (200, 1.0), (250, None), (300, 2.0), (350, None))
    assert [m.step for m in superfluous(run, Keep(last=1, every=100, best=False))] == [250]
    assert [m.step for m in superfluous(run, Keep(last=1, best=True))] == [100, 250, 300]


def test_a_manifest_that_lists_a_path_outside_the_folder_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, 10)
    manifest = layout.read_manifest(folder)
    files = manifest.files | {"../../secret": {"bytes": 1, "crc32": 1}}
    forged = Manifest(manifest.run_id, 10, manifest.committed_at, None, files)
    (folder / "manifest.json").write_text(forged.to_json())
    with pytest.raises(DamagedError, match="secret"):
        layout.read_manifest(folder)
    assert json.loads((folder / "manifest.json").read_text())["step"] == 10
