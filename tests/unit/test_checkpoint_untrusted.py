"""A checkpoint or an export from a stranger: every file that could hold a pickle holds a malicious one. None may run."""

import json
import os
import pickle
import zlib

import pytest
import torch
from checkpoint_helpers import small_gpt, write_checkpoint

from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.export import export_checkpoint
from lit_gpt_dist.checkpoint.metadata import UnsafeFileError, read_metadata
from lit_gpt_dist.checkpoint.sources import open_weights
from lit_gpt_dist.errors import UserError


class Malice:
    """Unpickling it creates a file."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.fixture
def proof(tmp_path):
    path = tmp_path / "executed"
    yield path
    assert not path.exists(), "code out of the file was run"


def forge(folder, name, data):
    """Replaces a file and makes the manifest agree, as whoever hands out a malicious checkpoint would."""
    (folder / name).write_bytes(data)
    manifest = layout.read_manifest(folder)
    manifest.files[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / "manifest.json").write_text(manifest.to_json())
    find.verify(folder)


def read_everything(folder):
    _, _, tensors = open_weights(folder)
    return dict(tensors)


def zipped_pickle(value):
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("disguise", ["plain pickle", "torch file"])
def test_malice_in_any_file_of_a_checkpoint_is_refused(tmp_path, proof, disguise):
    data = pickle.dumps(Malice(proof)) if disguise == "plain pickle" else zipped_pickle({"x": Malice(proof)})
    for name in [path.name for path in write_checkpoint(tmp_path / "model", 1).iterdir()]:
        folder = write_checkpoint(tmp_path / name, 1)
        if name == "manifest.json":
            (folder / name).write_bytes(data)
        else:
            forge(folder, name, data)
        with pytest.raises(UserError, match=r"cannot be used|damaged"):
            read_everything(folder)


def test_malice_in_the_place_of_one_tensor_is_refused(tmp_path, proof):
    """The metadata stays as it was; one tensor's bytes in a part are a malicious torch file."""
    folder = write_checkpoint(tmp_path, 1)
    place = next(
        place for index, place in read_metadata(folder).storage_data.items() if index.fqn == "model.embedding.weight"
    )
    data = bytearray((folder / place.relative_path).read_bytes())
    malice = zipped_pickle(Malice(proof))
    assert len(malice) <= place.length
    data[place.offset : place.offset + len(malice)] = malice
    data[place.offset + len(malice) : place.offset + place.length] = bytes(place.length - len(malice))
    forge(folder, place.relative_path, bytes(data))
    with pytest.raises(UserError, match="cannot be used"):
        read_everything(folder)


def test_malice_inside_true_metadata_is_refused(tmp_path, proof):
    """DCP's own objects with something hidden where a loader might look last."""
    folder = write_checkpoint(tmp_path, 1)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for hide in ("planner_data", "version", "storage_meta"):
        hidden = pickle.loads(pickle.dumps(metadata))
        setattr(hidden, hide, Malice(proof))
        (folder / ".metadata").write_bytes(pickle.dumps(hidden))
        with pytest.raises(UnsafeFileError, match=r"names posix\.mkdir, which DCP's metadata never does"):
            read_metadata(folder)


@pytest.mark.parametrize("target", ["builtins.eval", "torch.load", "torch.serialization.load", "torch.nn.Linear"])
def test_metadata_cannot_name_other_functions(tmp_path, target):
    module, name = target.rsplit(".", 1)
    folder = write_checkpoint(tmp_path, 1)
    (folder / ".metadata").write_bytes(b"c" + f"{module}\n{name}\n".encode() + b"(Vx\ntR.")
    with pytest.raises(UnsafeFileError, match="refused"):
        read_metadata(folder)


def test_metadata_cannot_point_outside_the_folder(tmp_path):
    folder = write_checkpoint(tmp_path, 1)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    next(iter(metadata.storage_data.values())).relative_path = "../../etc/passwd"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeFileError, match="not a part"):
        read_metadata(folder)


def test_a_tensor_that_was_saved_as_an_object_is_refused(tmp_path):
    """Stock DCP would unpickle such an entry without restriction."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"model.x": {"anything": 1}, "t": torch.ones(1)}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(UnsafeFileError):
        read_metadata(tmp_path / "c")


def test_malice_in_an_export_is_refused(tmp_path, proof):
    path = tmp_path / "weights.safetensors"
    for data in (pickle.dumps(Malice(proof)), zipped_pickle({"embedding.weight": Malice(proof)})):
        path.write_bytes(data)
        with pytest.raises(UserError, match="not a safetensors file"):
            read_everything(path)


@pytest.mark.parametrize(
    "config", [{"layers": "10**9"}, {"layers": 10**9}, {"layers": 2, "evil": 1}, [], {"width": True, "heads": 2.5}]
)
def test_an_export_with_an_impossible_configuration_is_refused(tmp_path, config):
    from safetensors.torch import save_file

    facts = json.dumps({"config": config, "vocabulary": None, "origin": {}})
    path = tmp_path / "weights.safetensors"
    save_file({"embedding.weight": torch.ones(2, 2)}, path, {"lit_gpt_dist": facts})
    with pytest.raises(UserError):
        read_everything(path)


def test_an_export_whose_weights_are_not_its_configurations_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, 1)
    path = tmp_path / "weights.safetensors"
    export_checkpoint(folder, path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors["norm.weight"]
    facts = json.dumps({"config": small_gpt().config.to_dict(), "vocabulary": None, "origin": {}})
    save_file(tensors, path, {"lit_gpt_dist": facts})
    with pytest.raises(UserError, match=r"lacks norm\.weight"):
        read_everything(path)


@pytest.mark.parametrize("kind", ["plain pickle", "torch file"])
def test_malice_in_a_hugging_face_folder_is_refused(tmp_path, proof, kind):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 4, "n_positions": 4, "vocab_size": 5})
    )
    data = pickle.dumps({"w": Malice(proof)}) if kind == "plain pickle" else zipped_pickle({"w": Malice(proof)})
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(UserError, match="nothing in it was run"):
        read_everything(tmp_path)


def test_a_hugging_face_index_cannot_point_outside_the_folder(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 4, "n_positions": 4, "vocab_size": 5})
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(UserError, match="not a file of the folder"):
        read_everything(tmp_path)
