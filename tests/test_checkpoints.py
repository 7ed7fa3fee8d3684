"""Checkpoints in shards, what loading one costs in memory, and saving and restoring through Orbax."""

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.checkpoints import load_checkpoint, save_checkpoint
from models.decoder import DecoderConfig, weight_shapes
from models.load import load
from models.placement import make_mesh, place_model, weight_shardings
from models.random_weights import random_weights
from models.safetensors_file import SafetensorsFile
from models.weights import GGUF, HUGGING_FACE, tensor_name
from tests.test_loaders import same_weights
from tests.test_models import DATA, SMALL
from tests.test_text import byte_text


def shard(name, folder, num_shards=3, drop=()):
    """The checkpoint `name` in shards with an index; tensors in `drop` are in the index only."""
    shutil.copytree(DATA / name, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(tensors)[number::num_shards]
        save_file({key: tensors[key] for key in names if key not in drop}, folder / file)
        places |= dict.fromkeys(names, file)
    write_index(folder, places)
    return folder, places


def write_index(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen3_tied"])
def test_shards_give_the_weights_of_the_single_file(tmp_path, name):
    folder, _ = shard(name, tmp_path / "m")
    one, other = load(folder, np.float32), load(DATA / name, np.float32)
    assert one.config == other.config
    assert same_weights(one.weights, other.weights)


def test_a_missing_or_truncated_shard_is_named(tmp_path):
    folder, places = shard("qwen2_untied", tmp_path / "m")
    path = folder / places["model.norm.weight"]
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    with pytest.raises(ValueError, match=f"{path.name}: damaged or truncated"):
        load(folder, np.float32)
    path.unlink()
    with pytest.raises(ValueError, match=f"missing shards: {path.name}"):
        load(folder, np.float32)


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path):
    folder, places = shard("qwen2_untied", tmp_path / "a", drop=["model.norm.weight"])
    with pytest.raises(ValueError, match=f"model.norm.weight is not in {places['model.norm.weight']}"):
        load(folder, np.float32)
    folder, places = shard("qwen2_untied", tmp_path / "b")
    del places["model.norm.weight"]
    write_index(folder, places)
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.norm\.weight"):
        load(folder, np.float32)


def test_shards_with_missing_unexpected_and_misshapen_tensors_name_them(tmp_path):
    folder, places = shard("qwen2_untied", tmp_path / "m")
    changes = {
        "model.layers.0.mlp.up_proj.weight": np.zeros((3, 3), np.float32),
        "model.layers.9.odd.weight": np.zeros(2, np.float32),
    }
    save_file(changes, folder / "more.safetensors")
    places |= dict.fromkeys(changes, "more.safetensors")
    del places["model.norm.weight"]
    for file in folder.glob("model-*.safetensors"):
        save_file({k: v for k, v in load_file(file).items() if places.get(k) == file.name}, file)
    write_index(folder, places)
    with pytest.raises(ValueError) as error:
        load(folder, np.float32)
    assert "missing tensors: model.norm.weight" in str(error.value)
    assert "unexpected tensors: model.layers.9.odd.weight" in str(error.value)
    assert "model.layers.0.mlp.up_proj.weight (is (3, 3)" in str(error.value)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    folder, places = shard("qwen2_untied", tmp_path / "m")
    path = next(path for path in folder.glob("model-*") if path.name != places["model.norm.weight"])
    save_file({**load_file(path), "model.norm.weight": np.zeros(96, np.float32)}, path)
    with pytest.raises(ValueError, match=f"unexpected tensors: model.norm.weight is in {path.name}"):
        load(folder, np.float32)


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}']
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, header):
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(ValueError, match="the header is wrong"):
        SafetensorsFile(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "places", [None, {"model.norm.weight": 3}, {"model.norm.weight": "../x.safetensors"}]
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path, places):
    folder, _ = shard("qwen2_untied", tmp_path / "m")
    write_index(folder, places)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load(folder, np.float32)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_tensors_are_converted_as_numpy_converts_them(tmp_path, stored, wanted, monkeypatch):
    monkeypatch.setattr("models.safetensors_file._BLOCK", 64)  # several blocks, the last one short
    values = np.random.default_rng(0).standard_normal((7, 11)).astype(jnp.dtype(stored))
    save_file({"odd": np.zeros(3, np.float32), "x": values, "none": values[:0]}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    read = file.read("x", jnp.dtype(wanted))
    assert read.dtype == jnp.dtype(wanted)
    np.testing.assert_array_equal(read, values.astype(jnp.dtype(wanted)))
    assert file.read("none", jnp.dtype(wanted)).shape == (0, 11)


def test_a_tensor_of_integers_is_refused_by_name(tmp_path):
    save_file({"ids": np.zeros(3, np.int32)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="ids has dtype I32"):
        SafetensorsFile(tmp_path / "m.safetensors").read("ids", np.float32)


# Anonymous and shared memory count, pages of the file cache do not. The runtime's own memory, and what a first
# small load adds to it, is taken before the measurement starts.
MEASURE = """
import pathlib, re, sys, threading, time
import jax, ml_dtypes, numpy
sys.path.insert(0, sys.argv[3])
from models.load import load

def resident():
    status = pathlib.Path("/proc/self/status").read_text()
    return sum(int(re.search(name + r":\\s+(\\d+)", status)[1]) for name in ("RssAnon", "RssFile", "RssShmem"))

load(sys.argv[1], ml_dtypes.bfloat16)
start, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
model = load(sys.argv[2], sys.argv[4])
done = True
thread.join()
print(1024 * (peak - start), sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)))
"""


LARGE = DecoderConfig(
    vocab_size=4000,
    width=1024,
    num_layers=10,
    num_heads=16,
    num_kv_heads=4,
    head_size=64,
    mlp_width=2304,
    norm_eps=1e-6,
    rope_theta=1e6,
    tied_embeddings=True,
    qkv_bias=True,
)


def write_large_checkpoint(folder):
    """Ten shards of 20 MB in bfloat16, as a tied Qwen2 model."""
    fields = json.loads((DATA / "qwen2_tied" / "config.json").read_text())
    fields |= {"vocab_size": 4000, "hidden_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 4, "intermediate_size": 2304, "layer_types": None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    leaves, _ = jax.tree_util.tree_flatten_with_path(weight_shapes(LARGE))
    shapes = {tensor_name(path, HUGGING_FACE): leaf.shape for path, leaf in leaves}
    places = {}
    for number in range(10):
        file = f"part-{number}.safetensors"
        names = list(shapes)[number::10]
        save_file({name: np.ones(shapes[name], jnp.bfloat16) for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    write_index(folder, places)
    return folder


def write_quantised_gguf(path, config):
    """The same model in one GGUF file, its matrices in eight bits."""
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    leaves, _ = jax.tree_util.tree_flatten_with_path(weight_shapes(config))
    for place, leaf in leaves:
        kind = gguf.GGMLQuantizationType.Q8_0 if leaf.ndim > 1 else gguf.GGMLQuantizationType.F32
        values = gguf.quantize(np.ones(leaf.shape, np.float32), kind)
        writer.add_tensor(tensor_name(place, GGUF), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def peak_of_loading(small, large, dtype="bfloat16"):
    """(most bytes in memory while `large` is loaded, bytes of its weights), in a process of its own."""
    root = DATA.parent.parent.parent
    command = [sys.executable, "-c", MEASURE, str(small), str(large), str(root), dtype]
    # glibc keeps freed blocks of up to 32 MB for later, some runs more than others; blocks mapped one by one go back.
    allocator = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    environment = {**os.environ, **allocator, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return [int(number) for number in done.stdout.split()]


def test_loading_shards_peaks_at_most_a_tenth_above_the_weights(tmp_path):
    small, _ = shard("qwen2_tied", tmp_path / "small")
    peak, weights = peak_of_loading(small, write_large_checkpoint(tmp_path / "large"))
    assert weights > 190e6
    assert peak <= 1.1 * weights


@pytest.mark.large
def test_expanding_a_quantised_file_peaks_at_most_a_tenth_above_the_weights(tmp_path):
    few = dataclasses.replace(LARGE, vocab_size=64, width=64, num_layers=1, head_size=4, mlp_width=64)
    small = write_quantised_gguf(tmp_path / "small.gguf", few)
    peak, weights = peak_of_loading(small, write_quantised_gguf(tmp_path / "large.gguf", LARGE))
    assert weights > 190e6
    assert peak <= 1.1 * weights


@pytest.mark.large
@pytest.mark.parametrize(
    ("stored", "dtype", "vocab_size"),
    [("float32", "bfloat16", 4000), ("bfloat16", "bfloat16", 4000), ("bfloat16", "float32", 24_000)],
)
def test_restoring_with_orbax_peaks_at_most_a_tenth_above_the_weights(tmp_path, stored, dtype, vocab_size):
    few = dataclasses.replace(LARGE, vocab_size=64, width=64, num_layers=1, head_size=4, mlp_width=64)
    # With many tokens embedding and head are a sixth of the weights each.
    many = dataclasses.replace(LARGE, vocab_size=vocab_size, tied_embeddings=vocab_size == 4000)
    for name, config in (("small", few), ("large", many)):
        save_checkpoint(tmp_path / name, config, random_weights(config, 0, jnp.dtype(stored)))
    peak, weights = peak_of_loading(tmp_path / "small", tmp_path / "large", dtype)
    assert weights > 190e6
    assert peak <= 1.1 * weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_orbax_round_trip_is_bit_equal(tmp_path, dtype):
    config = dataclasses.replace(
        SMALL, qkv_bias=True, rope_factors=(1.0, 2.0, 4.0, 8.0), final_logit_softcapping=30.0
    )
    weights = random_weights(config, 0, jnp.dtype(dtype))
    save_checkpoint(tmp_path / "m", config, weights, byte_text("{{ eos_token }}"))
    restored, values, text = load_checkpoint(tmp_path / "m")
    assert restored == config
    assert same_weights(values, weights)
    assert text.tokenizer.to_str() == byte_text().tokenizer.to_str()
    assert (text.eos_token_ids, text.chat_template) == (byte_text().eos_token_ids, "{{ eos_token }}")
    assert text.special_tokens == byte_text().special_tokens


def test_load_recognises_an_orbax_folder_and_converts_to_the_dtype_asked_for(tmp_path):
    weights = random_weights(SMALL, 0)
    save_checkpoint(tmp_path / "m", SMALL, weights)
    model = load(tmp_path / "m", jnp.bfloat16)
    assert model.config == SMALL
    assert model.text is None
    assert same_weights(model.weights, jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights))


def test_a_checkpoint_is_not_written_over_anything_nor_with_other_weights(tmp_path):
    weights = random_weights(SMALL, 0)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").touch()
    with pytest.raises(ValueError, match="exists already"):
        save_checkpoint(tmp_path / "m", SMALL, weights)
    with pytest.raises(ValueError, match="names and shapes"):
        save_checkpoint(tmp_path / "n", dataclasses.replace(SMALL, width=16), weights)
    mixed = {**weights, "norm": jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights["norm"])}
    with pytest.raises(ValueError, match="bfloat16, float32"):
        save_checkpoint(tmp_path / "n", SMALL, mixed)
    assert not (tmp_path / "n").exists()


# Orbax leaves callbacks and coroutines behind when it meets a damaged file; they are collected here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", ["no weights", "format", "field", "value", "shape", "cut"])
def test_a_damaged_orbax_folder_is_an_error_that_names_it(tmp_path, fault):
    folder = tmp_path / "m"
    save_checkpoint(folder, SMALL, random_weights(SMALL, 0))
    fields = json.loads((folder / "decoder.json").read_text())
    named = "weights: cannot be restored"
    if fault == "no weights":
        shutil.rmtree(folder / "weights")
        named = "no weights folder"
    elif fault == "format":
        fields["format"], named = 99, "format 99, expected 1"
    elif fault == "field":
        fields["config"]["depth"], named = 3, "depth"
    elif fault == "value":
        fields["config"]["mlp_width"], named = None, "mlp_width = None"
    elif fault == "shape":
        fields["config"]["mlp_width"] = 48
    else:
        for path in (folder / "weights").glob("**/d/*"):
            path.write_bytes(path.read_bytes()[:10])
    (folder / "decoder.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=named):
        load(folder, np.float32)
    gc.collect()


@pytest.mark.parametrize("kind", ["safetensors", "orbax", "gguf"])
def test_a_checkpoint_is_loaded_straight_to_a_mesh(tmp_path, kind):
    path = DATA / "qwen2_untied"
    if kind == "orbax":
        path = tmp_path / "own"
        save_checkpoint(path, SMALL, random_weights(SMALL, 5))
    elif kind == "gguf":
        config = dataclasses.replace(
            SMALL, qkv_bias=True, tied_embeddings=True, width=64, mlp_width=64, head_size=16
        )
        path = write_quantised_gguf(tmp_path / "small.gguf", config)
    mesh = make_mesh({"data": 1, "tensor": 2})
    alone, model = load(path, jnp.float32), load(path, jnp.float32, mesh)
    assert model.config == alone.config
    wanted = weight_shardings(model.config, mesh)
    for one, other, place in zip(*map(jax.tree.leaves, (model.weights, alone.weights, wanted)), strict=True):
        assert one.sharding.is_equivalent_to(place, one.ndim)
        np.testing.assert_array_equal(one, other)
    down = model.weights["layers"][0]["mlp"]["down"]["weight"]
    assert down.addressable_shards[0].data.shape == (model.config.width, model.config.mlp_width // 2)
    config, placed = place_model(model.config, model.weights, mesh)
    assert config == model.config
    assert placed["layers"][0]["mlp"]["down"]["weight"].sharding == down.sharding
