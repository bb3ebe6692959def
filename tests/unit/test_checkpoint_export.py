import json
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import VOCABULARY, small_gpt, write_checkpoint
from safetensors.torch import load_file

from lit_gpt_dist.checkpoint import export, hf_layouts, importing, stream
from lit_gpt_dist.checkpoint.export import export_checkpoint
from lit_gpt_dist.checkpoint.importing import import_folder
from lit_gpt_dist.checkpoint.sources import open_weights
from lit_gpt_dist.checkpoint.stream import Entry, write_safetensors
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.outputs import put_in_place

transformers = pytest.importorskip("transformers")

LLAMA = dict(norm="rmsnorm", positions="rope", activation="swiglu", tied=False, ff_width=24)
SHAPES = {
    "gpt2 without biases": dict(),
    "gpt2 with biases": dict(bias=True),
    "gpt2 untied": dict(tied=False, ff_width=40),
    "llama": LLAMA,
    "llama with grouped queries": LLAMA | dict(heads=4, kv_heads=2, rope_base=500.0, norm_eps=1e-4),
    "llama tied": LLAMA | dict(tied=True),
    "llama with biases": LLAMA | dict(bias=True),
}
TOKENS = torch.tensor([[1, 5, 36, 0, 7, 7, 20, 3, 2, 11]])
TOLERANCE = 1e-5  # fp32 sums in another order; logits are of size 1


def build(config, tensors):
    model = GPT(config)
    model.load_state_dict(dict(tensors), strict=False)
    return model.eval()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_exported_folder_opens_in_transformers_with_the_same_logits(tmp_path, shape):
    model = small_gpt(**SHAPES[shape])
    folder = tmp_path / "hf"
    export_checkpoint(write_checkpoint(tmp_path, 3, model=model), folder, "hf")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        close(theirs.eval()(TOKENS).logits, model(TOKENS))


def random_folder(folder, kind, **save):
    torch.manual_seed(3)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, n_positions=12, vocab_size=37, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=37,
            max_position_embeddings=32,
        )
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too must matter
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **save)
    return model.eval()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("saved", ["one file", "shards", "pickled tensors"])
def test_a_folder_of_transformers_imports_with_the_same_logits(tmp_path, kind, saved):
    theirs = random_folder(tmp_path / "hf", kind, **({"max_shard_size": "10KB"} if saved == "shards" else {}))
    if saved == "shards":
        assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    if saved == "pickled tensors":
        file = tmp_path / "hf" / "model.safetensors"
        torch.save(load_file(file), tmp_path / "hf" / "pytorch_model.bin")
        file.unlink()
    assert importing.main([str(tmp_path / "hf"), "--out", str(tmp_path / "ours")]) == 0
    config, vocabulary, tensors = open_weights(tmp_path / "ours")
    assert vocabulary is None
    with torch.no_grad():
        close(build(config, tensors)(TOKENS), theirs(TOKENS).logits)


def test_a_folder_without_the_head_imports_too(tmp_path):
    """As the original GPT-2 folders: names without their first part, masks among the weights."""
    theirs = random_folder(tmp_path / "hf", "gpt2")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 12, 12)
    write_safetensors(file, [Entry(n, t.dtype, tuple(t.shape), lambda t=t: t) for n, t in tensors.items()], {})
    config, _, ours = open_weights(tmp_path / "hf")
    with torch.no_grad():
        close(build(config, ours)(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize("shape", ["gpt2 with biases", "llama with grouped queries"])
def test_export_and_import_give_back_every_weight_bit_for_bit(tmp_path, shape):
    model = small_gpt(**SHAPES[shape])
    export_checkpoint(write_checkpoint(tmp_path, 3, model=model), tmp_path / "hf", "hf")
    import_folder(tmp_path / "hf", tmp_path / "back.safetensors")
    config, vocabulary, tensors = open_weights(tmp_path / "back.safetensors")
    assert config == model.config
    assert json.loads(vocabulary) == VOCABULARY
    for name, tensor in tensors:
        assert torch.equal(tensor, model.get_parameter(name))


def test_one_file_explains_itself(tmp_path):
    model = small_gpt()
    path = tmp_path / "weights.safetensors"
    assert export.main([str(write_checkpoint(tmp_path, 7, model=model)), "--out", str(path)]) == 0
    config, vocabulary, tensors = open_weights(path)
    assert config == model.config
    assert json.loads(vocabulary) == VOCABULARY
    assert {name: tensor.tolist() for name, tensor in tensors} == {
        name: parameter.tolist() for name, parameter in model.named_parameters()
    }
    assert sorted(load_file(path)) == sorted(name for name, _ in model.named_parameters())  # the library reads it too


def test_a_runs_folder_means_its_newest_whole_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 1, model=small_gpt(1))
    newest = small_gpt(2)
    write_checkpoint(tmp_path, 2, model=newest)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "last"):
        weights = dict(open_weights(path)[2])
        assert torch.equal(weights["norm.weight"], newest.norm.weight)


def test_weights_can_be_written_in_another_type(tmp_path):
    model = small_gpt()
    export_checkpoint(write_checkpoint(tmp_path, 1, model=model), tmp_path / "w.safetensors", dtype="bfloat16")
    for name, tensor in open_weights(tmp_path / "w.safetensors")[2]:
        assert torch.equal(tensor, model.get_parameter(name).bfloat16())


@pytest.mark.parametrize(
    "shape", [dict(norm="rmsnorm"), dict(positions="rope"), dict(heads=4, kv_heads=2), LLAMA | dict(norm="layernorm")]
)
def test_a_shape_without_a_hugging_face_layout_is_refused_before_anything_is_written(tmp_path, shape):
    checkpoint = write_checkpoint(tmp_path, 1, model=small_gpt(**shape))
    with pytest.raises(UserError, match="--format safetensors"):
        export_checkpoint(checkpoint, tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()
    export_checkpoint(checkpoint, tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' cannot be imported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled .llama3."),
        ({"hidden_act": "relu"}, "computes silu"),
        ({"head_dim": 12}, "head_dim 12"),
    ],
)
def test_a_folder_that_computes_something_else_is_refused(change, message):
    config = hf_layouts.to_hf_config(small_gpt(**LLAMA).config, "float32") | change
    with pytest.raises(UserError, match=message):
        hf_layouts.from_hf_config(config)


def test_an_existing_folder_is_not_written_into(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("keep")
    with pytest.raises(UserError, match="exists already"):
        export_checkpoint(checkpoint, tmp_path / "hf", "hf")
    with pytest.raises(UserError, match="no folder that export wrote"):
        export_checkpoint(checkpoint, tmp_path / "hf", "hf", overwrite=True)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine"]


def commands_to_write(tmp_path):
    """Each way to write weights: what is typed, and the file that holds them afterwards."""
    checkpoint = str(write_checkpoint(tmp_path, 1, model=small_gpt()))
    export_checkpoint(write_checkpoint(tmp_path, 2, model=small_gpt()), tmp_path / "source", "hf")
    one, folder, imported = (tmp_path / name for name in ("one.safetensors", "folder", "imported"))
    return {
        "one file": (export, [checkpoint, "--out", str(one)], one),
        "hf": (export, [checkpoint, "--format", "hf", "--out", str(folder)], folder / "model.safetensors"),
        "import": (
            importing,
            [str(tmp_path / "source"), "--out", str(imported)],
            imported / "model.safetensors",
        ),
    }


@pytest.mark.parametrize("way", ["one file", "hf", "import"])
def test_weights_that_are_there_are_replaced_only_on_demand_and_by_whole_ones(tmp_path, way, monkeypatch):
    command, typed, file = commands_to_write(tmp_path)[way]
    assert command.main(typed) == 0
    before, names = file.read_bytes(), sorted(tmp_path.rglob("*"))
    other = [*typed, "--dtype", "bfloat16"]
    with pytest.raises(UserError, match="exists already; give another --out, or --overwrite to replace it"):
        command.main(other)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_bytes_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            command.main([*other, "--overwrite"])
    assert file.read_bytes() == before
    assert command.main([*other, "--overwrite"]) == 0
    assert len(file.read_bytes()) < len(before)
    assert sorted(tmp_path.rglob("*")) == names  # neither the old ones nor half-written ones lie beside


def interrupt(entry):
    raise KeyboardInterrupt


def test_a_folder_that_does_not_get_its_name_leaves_the_old_one(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "never made", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_no_file(tmp_path):
    def fail():
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_safetensors(tmp_path / "w.safetensors", [Entry("x", torch.float32, (2,), fail)], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["w.txt", "w.pt"])
def test_a_name_of_another_kind_of_file_is_not_taken_for_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        UserError, match=r"neither a \.safetensors file nor a folder; give for example .*w\.safetensors"
    ):
        export.main([str(tmp_path), "--out", str(tmp_path / name)])
    assert not any(tmp_path.iterdir())
