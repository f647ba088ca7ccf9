"""kvferry reads configurations as the installed transformers writes them, for every family that kvferry knows.

A small configuration of each class, in which all sizes differ, is saved and read. Rules of this file derive
each layer's cache from the attributes of the configuration object. The shipped configurations are read as they
are, and again after transformers has loaded and saved them. For families whose layers have heads a tiny model
is run, and its cache must have the same shapes.
"""

from __future__ import annotations

import json
import pathlib
import re
import tempfile
import unittest
import warnings
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

import kvferry
from kvferry import Dtype, Model

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "models").glob("*.json"))

# transformers has no class with these names; most of them are in families_test.py
UNKNOWN_HERE = set(
    re.findall(
        r"\S+",
        "kimi_k2 mimo_v2 internlm2 internlm3 baichuan qwen xverse minicpm deepseek orion phi3small grok-1 "
        "iquestcoder bailing_moe bailing_moe_v2 sarvam_moe sarvam_mla param2moe PanguEmbedded pangu_ultra_moe "
        "telechat exaone chatglm step1 step3_text mimo dots_ocr dots_vlm isaac kimi_vl phi3_v nemotron-nas "
        "qwen3_asr_text beam deepseek_v41 deepseek_v41_text dots3_note flint inkling_model kimi_k3 "
        "minimax_m3_text muse_spark muse_spark_text step5 step5_vl sdar sdar_moe llada2_moe k2_horizon xllm "
        "nanbeige iquestloopcoder molmo molmo2_text Keye KeyeVL1_5 minicpmv minicpmo kimi_audio phi4mm "
        "RefinedWeb RefinedWebModel telechat3 TeleFLM spark2_5 dory interns2_mobius interns2_mobius_text "
        "bailing_hybrid bailing_moe_v3_vl gigachat3_5 alice_ai apertus1p5 apertus1p5_text granite_docling "
        "granite_docling_text unlimited_ocr unlimited_ocr_text kolibri1 hy_v4_vl hy_v4_vl_text lfm3 lara_mini "
        "inkling2 inkling2_text inkling2_loop inkling2_loop_text "
        "dots3_note_text mistral_large4 mistral_large4_text",
    )
)

LAYERS = 8
TOKENS = 5

# Those of these fields that a class has are set: no two sizes are equal.
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 20,
    "sliding_window": 48,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "attention_chunk_size": 40,
    "no_rope_layer_interval": 3,
    "num_kv_shared_layers": 2,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 14,
    "v_head_dim": 18,
    "q_lora_rank": 30,
    "index_head_dim": 256,
    "index_n_heads": 5,
    "linear_conv_kernel_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 11,
    "linear_value_head_dim": 13,
    "linear_num_heads": 7,
    "linear_head_dim": 15,
    "index_kpool": 6,
    "hc_count": 3,
    "ple_conv_kernel_size": 5,
    "ngram_size": 2,
    "conv_kernel": 5,
    "conv_L_cache": 5,
    "expand": 3,
    "state_size": 9,
    "ssm_state_size": 9,
    "mamba_d_conv": 5,
    "mamba_d_state": 9,
    "mamba_expand": 3,
    "mamba_n_heads": 12,
    "mamba_d_head": 24,
    "mamba_n_groups": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 7,
    "n_groups": 4,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "n_embd": 96,
    "d_model": 96,
    "n_head": 6,
    "n_heads": 6,
    "num_kv_heads": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_layers": LAYERS,
    "num_heads": 6,
    "attention_heads": 6,
    "kv_channels": 20,
    "mamba_ngroups": 4,
    "n_mamba_heads": 12,
}

INSIDE = {
    "granite4_vision": "granite",
    "inkling_mm_model": "inkling_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
}

# Fields that a class requires, or that it needs in its own form.
OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 64, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
    "longcat_flash": {"num_layers": LAYERS // 2},
    "muse_glimmer_text": {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2)},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 12, "head_dim": 24},
    "dbrx": {"attn_config": {"kv_n_heads": 3, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "dots1": {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "diffllama": {"num_key_value_heads": 2},  # an odd number is refused
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cosmos3_edge_text": {"head_dim": 128},  # twice the sum of the sections of its rotation
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2)},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * (LAYERS // 2)},
    "nemotron_h": {
        "sliding_window": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "bamba": {"attn_layer_indices": [1, 4, 6]},
    "falcon_h1": {"mamba_d_ssm": 60, "mamba_d_head": 5},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * (LAYERS // 2)},
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
        "num_sliding_attention_heads": 12,
    },
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "glm5_next_text": {
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "qk_rope_head_dim": 0,
        "index_topk": 12,
        "layer_types": ["linear_attention", "indexed_attention"] * (LAYERS // 2),
        "indexer_types": ["full"] * 4 + ["shared", "shared", "full", "shared"],
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * (LAYERS // 2),
        "indexer_n_heads": 5,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 260,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 5],
        "ple_embed_dim": 96,
        "ngram_vocab_size_base": 50,
        "eos_token_id": 2,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2),
        "index_n_heads": 3,
    },
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * (LAYERS // 2),
        "sliding_window_size": 48,
        "conv_kernel_size": 5,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 22,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "compressed_sparse_attention",
        ]
        * (LAYERS // 4),
    },
}

# Families with heads whose class is a language model by itself. Families with latents or states are not among
# them: transformers keeps those in other forms.
WITH_HEADS = re.findall(
    r"\w+",
    "llama granite granitemoe granitemoeshared olmo olmo2 olmoe cohere stablelm glm4_moe glm glm4 minimax_m2 "
    "gemma mistral ministral ministral3 mixtral phimoe starcoder2 phi3 qwen3_moe qwen2 qwen2_moe qwen3 gemma2 "
    "gemma3_text gemma3n_text gemma4_text gpt_oss cohere2 olmo3 exaone4 llama4_text "
    "flex_olmo phi arcee apertus hyperclovax jais2 nanochat hunyuan_v1_dense hunyuan_v1_moe gpt_neox opt "
    "nemotron ernie4_5 ernie4_5_moe bitnet hy_v3 solar_open seed_oss phi4_multimodal vaultgemma smollm3 mellum "
    "laguna cohere2_moe afmoe cwm granite_swa granitemoe_swa exaone_moe gemma4_unified_text "
    "gpt2 gptj bloom mpt gpt_bigcode falcon mimo_v2_flash gpt_neox_japanese biogpt persimmon diffllama ctrl "
    "dbrx gpt_neo xglm jetmoe doge dots1 cohere_compass_text",
)
TINY = {
    "vocab_size": 32,
    "vocab_size_per_layer_input": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size_per_layer_input": 4,
    "intermediate_size": 16,
    "intermediate_size_mlp": 16,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "rotary_dim": 8,
}

KINDS: dict[str, set[str]] = {
    "full_attention": {"full"},
    "indexed_attention": {"full"},
    "sliding_attention": {"window"},
    "compressed_sparse_attention": {"window", "csa", "csa.state"},
    "heavily_compressed_attention": {"window", "hca", "hca.state"},
    "minimax_m3_sparse": {"full"},
    "hybrid_sliding": {"window", "state"},
    "chunked_attention": {"chunk"},
    "linear_attention": {"state"},
    "conv": {"state"},
    "hybrid": {"full", "state"},
    "moe": set(),
    "mlp": set(),
}

# Fields that published configurations leave out.
LEFT_OUT = {
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query",
    "new_decoder_architecture",
    "head_dim",
    "v_head_dim",
    "kv_channels",
    "attn_config",
    "attention_head_dim",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "attention_chunk_size",
    "layer_types",
    "layers_block_type",
    "no_rope_layers",
    "num_kv_shared_layers",
    "per_layer_config",
    "index_head_dim",
    "indexer_types",
    "compress_rates",
}

# Each part's name, dtype, units, elements of a cell, and rows.
Parts = tuple[tuple[str, Dtype, int, int, int], ...]

# The cache of one layer: window, chunk, tokens that share an entry, and parts.
Kept = tuple[int, int, int, Parts]


def families() -> list[str]:
    return [name for family in kvferry.config_families() for name in family]


READABLE = [name for name in families() if name not in UNKNOWN_HERE]


def text_class(kind: str) -> tuple[type[PreTrainedConfig], str]:
    """The class of the language model of a family, and its model_type."""
    whole = CONFIG_MAPPING[kind]
    inner = whole.sub_configs.get("text_config", whole)
    if inner is AutoConfig:  # a wrapper of any language model
        inner = CONFIG_MAPPING[INSIDE[kind]]
    return inner, inner.model_type


def small(kind: str) -> PreTrainedConfig:
    """A small configuration of a family, inside its wrapper if the family has one."""
    inner, name = text_class(kind)
    fields = {key: value for key, value in SIZES.items() if key in inner.__dataclass_fields__}
    if name == "nemotron_h":
        fields.pop("num_hidden_layers", None)  # its class counts the list
    fields.update(OWN.get(name, {}))
    text = inner(dtype="float16", **fields)
    return text if CONFIG_MAPPING[kind] is inner else CONFIG_MAPPING[kind](text_config=text.to_dict())


def save(config: PreTrainedConfig) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        text = (pathlib.Path(folder) / "config.json").read_text()
    saved: dict[str, Any] = json.loads(text)
    return saved


def load(config: dict[str, Any]) -> PreTrainedConfig:
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        return AutoConfig.from_pretrained(folder)


def read(config: dict[str, Any]) -> Model:
    """Reads a configuration; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", kvferry.ConfigWarning)
        return Model.from_config(config)


def kept(model: Model) -> dict[int, set[Kept]]:
    """The cache of each layer, as kvferry has read it."""
    found: dict[int, set[Kept]] = {layer: set() for layer in range(model.layer_count)}
    for group in model.groups:
        parts = tuple(
            (part.name, Dtype(part.dtype), part.units, part.cell_elements, part.rows_per_step)
            for part in group.parts
        )
        for layer in group.layers:
            found[layer].add((group.window_tokens, group.chunk_tokens, group.tokens_per_step, parts))
    return found


# ---- the rules for a configuration object --------------------------------------------------------


def kinds(text: Any) -> list[set[str]]:
    """The kinds of cache of each layer; layers that use another's cache have none."""
    name = text.model_type
    types = getattr(text, "layer_types", None)
    if name in ("mamba", "falcon_mamba"):
        words = [{"state"} for _ in range(text.num_hidden_layers)]
    elif types:
        words = [set(KINDS[word]) for word in types]
    else:
        window = getattr(text, "sliding_window", None) is not None
        words = [{"window"} if window else {"full"} for _ in range(text.num_hidden_layers)]
    shared = getattr(text, "num_kv_shared_layers", 0)
    return words[: len(words) - shared] + [set() for _ in range(shared)]


def indexer_parts(width: int) -> Parts:
    """One byte for each element of a key, and a scale for every 128."""
    return (("indexer", Dtype.F8_E4M3, 1, width, 1), ("indexer_scale", Dtype.F32, 1, width // 128, 1))


def attention_parts(text: Any, layer: int) -> Parts:
    dtype = Dtype.F16
    if text.model_type == "deepseek_v4":
        return (("latent", dtype, 1, text.head_dim, 1),)
    if hasattr(text, "kv_lora_rank"):
        latent = ("latent", dtype, 1, text.kv_lora_rank + text.qk_rope_head_dim, 1)
        indexers = getattr(text, "indexer_types", None)
        apart = hasattr(text, "index_kpool")
        if apart or not hasattr(text, "index_head_dim") or (indexers and indexers[layer] == "shared"):
            return (latent,)
        return (latent, *indexer_parts(text.index_head_dim))
    one = text.per_layer_config[layer]
    heads = getattr(one, "num_key_value_heads", None) or one.num_attention_heads
    if text.model_type == "falcon":
        several = text.new_decoder_architecture or not text.multi_query
        heads = text.num_kv_heads if several else 1
    width = getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads
    width_v = width
    if text.model_type == "inkling_text" and text.layer_types[layer] == "hybrid_sliding":
        heads, width, width_v = text.swa_num_key_value_heads, text.swa_head_dim, text.swa_head_dim
    if text.model_type == "mimo_v2_flash":
        heads *= 2 if text.layer_types[layer] == "sliding_attention" else 1
        width_v = text.v_head_dim
    return (("k", dtype, heads, width, 1), ("v", dtype, heads, width_v, 1))


def indexers(text: Any, layer: int) -> set[Kept]:
    """The keys of a layer's indexer that are in a group of their own, and what its tokens give to the next."""
    name, word, dtype = text.model_type, text.layer_types[layer], Dtype.F16
    if name == "minimax_m3_vl_text" and word == "minimax_m3_sparse":
        return {(0, 0, 1, (("indexer", dtype, 1, text.index_head_dim, 1),))}
    if name == "qwen4_exp_text" and word == "indexed_attention" and text.indexer_n_heads:
        width, tokens = text.indexer_head_dim, text.indexer_compress_ratio
        return {
            (0, 0, tokens, (("indexer", dtype, 1, width, 1),)),
            (tokens, 0, 1, (("indexer_key", dtype, 1, width, 1),)),
        }
    if name == "glm5_next_text" and word == "indexed_attention" and text.indexer_types[layer] == "full":
        width, tokens = text.index_head_dim, text.index_kpool
        pending = tuple((part, dtype, 1, width, 1) for part in ("indexer_key", "indexer_gate"))
        return {(0, 0, tokens, indexer_parts(width)), (tokens, 0, 1, pending)}
    return set()


def stream_convs(text: Any, layer: int) -> set[Kept]:
    """The inputs of a convolution over all residual streams (Qwen 4), whose taps are n tokens apart."""
    if layer + 1 not in getattr(text, "ple_layer_ids", ()):
        return set()
    rows = (text.ple_conv_kernel_size - 1) * text.ngram_size
    return {(0, 0, 1, (("conv.x", Dtype.F16, text.hc_count * text.hidden_size, 1, rows),))}


def compressed(text: Any, kind: str) -> Kept:
    """Entries of several tokens (DeepSeek V4), or what the tokens of the next one give to it.

    A sparse layer has an indexer, and its tokens go into two entries each. For every entry a token gives as
    many elements as the entry has, and as many scores.
    """
    sparse = kind.startswith("csa")
    rate = text.compress_rates[f"{'compressed_sparse' if sparse else 'heavily_compressed'}_attention"]
    if not kind.endswith("state"):
        latent = attention_parts(text, 0)
        return (0, 0, rate, (*latent, *indexer_parts(text.index_head_dim)) if sparse else latent)
    if not sparse:
        return (rate, 0, 1, (("compressor", Dtype.F32, 1, 2 * text.head_dim, 1),))
    return (
        2 * rate,
        0,
        1,
        (
            ("compressor", Dtype.F32, 1, 2 * 2 * text.head_dim, 1),
            ("indexer_compressor", Dtype.F32, 1, 2 * 2 * text.index_head_dim, 1),
        ),
    )


def state_parts(text: Any, layer: int) -> Parts:
    name, dtype = text.model_type, Dtype.F16
    if name == "inkling_text":
        heads, width = attention_parts(text, layer)[0][2:4]
        rows, hidden = text.conv_kernel_size - 1, text.hidden_size
        streams = (("k", heads * width), ("v", heads * width), ("attn", hidden), ("mlp", hidden))
        return tuple((f"conv.{stream}", dtype, channels, 1, rows) for stream, channels in streams)
    if name in ("mamba", "falcon_mamba"):
        inner = text.expand * text.hidden_size
        return (("conv.x", dtype, inner, 1, text.conv_kernel - 1), ("ssm", dtype, inner, text.state_size, 1))
    if name == "jamba":
        inner = text.mamba_expand * text.hidden_size
        return (
            ("conv.x", dtype, inner, 1, text.mamba_d_conv - 1),
            ("ssm", dtype, inner, text.mamba_d_state, 1),
        )
    if name in ("lfm2", "lfm2_moe"):
        return (("conv.x", dtype, text.hidden_size, 1, text.conv_L_cache - 1),)
    if name in ("kimi_linear", "glm5_next_text"):
        heads, width, rows = text.linear_num_heads, text.linear_head_dim, text.linear_conv_kernel_dim - 1
        conv = tuple((f"conv.{letter}", dtype, heads * width, 1, rows) for letter in "QKV")
        return (*conv, ("ssm", Dtype.F32, heads, width * width, 1))
    if hasattr(text, "linear_num_value_heads"):
        rows = text.linear_conv_kernel_dim - 1
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        cell = text.linear_key_head_dim * text.linear_value_head_dim
        conv = tuple((f"conv.{x}", dtype, n, 1, rows) for x, n in (("Q", keys), ("K", keys), ("V", values)))
        return (*conv, ("ssm", dtype, text.linear_num_value_heads, cell, 1))
    if name == "mamba2":
        heads, width, groups, size = text.num_heads, text.head_dim, text.n_groups, text.state_size
        rows = text.conv_kernel - 1
    elif name == "nemotron_h":
        heads, width, groups = text.mamba_num_heads, text.mamba_head_dim, text.n_groups
        size, rows = text.ssm_state_size, text.conv_kernel - 1
    elif name == "zamba2":
        heads, width, groups = text.n_mamba_heads, text.mamba_headdim, text.mamba_ngroups
        size, rows = text.mamba_d_state, text.mamba_d_conv - 1
    else:
        heads, width, groups = text.mamba_n_heads, text.mamba_d_head, text.mamba_n_groups
        size, rows = text.mamba_d_state, text.mamba_d_conv - 1
    conv = tuple(
        (f"conv.{x}", dtype, n, 1, rows)
        for x, n in (("x", heads * width), ("B", groups * size), ("C", groups * size))
    )
    ssm = Dtype.by_name(getattr(text, "mamba_ssm_cache_dtype", "float16"))
    return (*conv, ("ssm", ssm, heads, width * size, 1))


def expected(config: PreTrainedConfig) -> dict[int, set[Kept]]:
    text: Any = config.get_text_config(decoder=True)
    found: dict[int, set[Kept]] = {}
    for layer, words in enumerate(kinds(text)):
        found[layer] = set()
        for word in words:
            if word[:3] in ("csa", "hca"):
                found[layer].add(compressed(text, word))
                continue
            window = text.sliding_window if word == "window" else 0
            chunk = text.attention_chunk_size if word == "chunk" else 0
            parts = state_parts(text, layer) if word == "state" else attention_parts(text, layer)
            found[layer].add((window, chunk, 1, parts))
        if getattr(text, "layer_types", None):
            found[layer] |= indexers(text, layer) | stream_convs(text, layer)
    return found


# ---- the tests ---------------------------------------------------------------------------------------


class Saved(unittest.TestCase):
    maxDiff = None

    def test_every_family_is_one_of_transformers_or_known_not_to_be(self) -> None:
        missing = {name for name in families() if name not in CONFIG_MAPPING}
        self.assertEqual(missing, UNKNOWN_HERE)
        self.assertGreater(len(READABLE), 100)

    def test_a_saved_configuration_is_what_its_object_says(self) -> None:
        for name in READABLE:
            with self.subTest(name):
                config = small(name)
                self.assertEqual(kept(read(save(config))), expected(config))

    def test_a_configuration_with_everything_in_it_is_the_same(self) -> None:
        """The file has all fields, not only those that differ from the base class, and every layer in full."""
        for name in READABLE:
            with self.subTest(name):
                config = small(name)
                text = config.get_text_config(decoder=True)
                text.serialize_explicit_per_layer_config = True
                whole = json.loads(config.to_json_string(use_diff=False))
                self.assertEqual(kept(read(whole)), expected(config))

    def test_a_field_that_is_left_out_is_the_default_of_its_class_or_refused(self) -> None:
        counted = {"the default": 0, "refused": 0}
        for name in READABLE:
            saved = save(small(name))
            text = saved.get("text_config", saved)
            for field in sorted(set(text) & LEFT_OUT):
                value = text.pop(field)
                with self.subTest(name, field=field):
                    try:
                        found = kept(read(saved))
                    except (kvferry.InvalidError, kvferry.ConfigWarning) as error:
                        self.assertRegex(str(error), f"missing|{field}|sliding_window")
                        counted["refused"] += 1
                    else:
                        self.assertEqual(found, expected(load(saved)))
                        counted["the default"] += 1
                text[field] = value
        self.assertGreater(min(counted.values()), 50, counted)

    def test_a_size_that_is_written_otherwise_is_read_otherwise(self) -> None:
        """The control: if one size in the file changes, no family matches its object."""
        for name in READABLE:
            with self.subTest(name):
                config = small(name)
                saved = save(config)
                text = saved.get("text_config", saved)
                field = next(
                    field
                    for field in (
                        "kv_lora_rank",
                        "linear_key_head_dim",
                        "ssm_state_size",
                        "state_size",
                        "mamba_d_state",
                        "head_dim",
                        "kv_channels",
                        "n_embd",
                        "d_model",
                        "hidden_size",
                    )
                    if field in text
                )
                text[field] *= 2
                if field == "hidden_size":
                    text["intermediate_size"] = 0
                self.assertNotEqual(kept(read(saved)), expected(config))

    def test_gemma_4_has_full_layers_of_its_own_in_both_forms(self) -> None:
        """By hand: the sixth and the last of eight layers are full, and the last two use another's cache."""
        saved = save(small("gemma4_text"))
        self.assertIn("per_layer_config", saved)
        self.assertNotIn("global_head_dim", saved)
        del saved["per_layer_config"]
        former = {**saved, "global_head_dim": 64, "num_global_key_value_heads": 2}
        for config in (save(small("gemma4_text")), former):
            full, window = read(config).groups
            self.assertEqual((full.name, full.layers), ("full", (5,)))
            self.assertEqual([(part.units, part.cell_elements) for part in full.parts], [(2, 64)] * 2)
            self.assertEqual((window.name, window.layers, window.window_tokens), ("swa", (0, 1, 2, 3, 4), 48))
            self.assertEqual([(part.units, part.cell_elements) for part in window.parts], [(3, 20)] * 2)
        self.assertNotEqual(kept(read(saved)), expected(small("gemma4_text")))

    def test_deepseek_v4_compresses_the_same_by_words_and_by_ratios(self) -> None:
        """By hand: four sparse layers and two heavy ones; a checkpoint's list goes on with a draft layer."""
        saved = save(small("deepseek_v4"))
        ratios = {"compress_ratios": [0, 128, 4, 4] * 2 + [0]}
        former = {key: value for key, value in saved.items() if not key.startswith(("layer_t", "compress_r"))}
        self.assertIn("layer_types", saved)
        self.assertNotIn("layer_types", former)
        self.assertEqual(kept(read({**former, **ratios})), expected(load({**former, **ratios})))
        for config in (saved, {**former, **ratios}, {**saved, **ratios}):
            shapes = [(g.name, g.layers, g.window_tokens, g.tokens_per_step) for g in read(config).groups]
            self.assertEqual(
                shapes,
                [
                    ("swa", tuple(range(LAYERS)), 48, 1),
                    ("csa", (2, 3, 6, 7), 0, 4),
                    ("csa.state", (2, 3, 6, 7), 8, 1),
                    ("hca", (1, 5), 0, 128),
                    ("hca.state", (1, 5), 128, 1),
                ],
            )
        with self.assertRaisesRegex(kvferry.InvalidError, r"compress_ratios\[1\] is 4, but layer_types\[1\]"):
            read({**saved, "compress_ratios": [0, 4, 4, 4] * 2})


class Shipped(unittest.TestCase):
    def test_a_shipped_configuration_is_the_same_after_transformers_has_saved_it(self) -> None:
        self.assertGreater(len(SHIPPED), 15)
        for path in SHIPPED:
            with self.subTest(path.stem):
                shipped = json.loads(path.read_text())
                direct, again = read(shipped), read(save(load(shipped)))
                direct.compare(again)
                self.assertEqual(direct.groups, again.groups)

    def test_another_configuration_is_not_the_same(self) -> None:
        for path in SHIPPED:
            with self.subTest(path.stem):
                shipped = json.loads(path.read_text())
                other = json.loads(path.read_text())
                text = other.get("text_config", other)
                if text["model_type"] == "deepseek_v4":  # of one head, whatever else is given
                    text["head_dim"] = 256
                else:
                    text["kv_lora_rank" if "kv_lora_rank" in text else "num_key_value_heads"] = 1
                with self.assertRaises(kvferry.MismatchError):
                    read(shipped).compare(read(save(load(other))))


def tiny(name: str, **more: Any) -> PreTrainedConfig:
    """The small configuration of a family, of a model that is small enough to run."""
    config = small(name)
    for field, value in {**TINY, **more}.items():
        if isinstance(getattr(config, field, None), type(value)):
            setattr(config, field, value)
    config.dtype = torch.float32
    return config


def run(config: PreTrainedConfig, model: torch.nn.Module) -> DynamicCache:
    """What a model with random weights keeps of a few tokens."""
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model.eval()(torch.arange(TOKENS)[None] + 3, past_key_values=cache, use_cache=True)
    return cache


def found_widths(name: str, layer: Any) -> dict[str, int]:
    """How many elements of a token, or channels, a layer of transformers' cache has of each thing."""
    found = {}
    if getattr(layer, "keys", None) is not None:
        found["keys"] = layer.keys.shape[1] * layer.keys.shape[3]
        found["values"] = layer.values.shape[1] * layer.values.shape[3]
    index = getattr(layer, "indexer_keys", None)
    if index is None:
        index = getattr(layer, "idx_keys", None)
    if index is not None:
        found["indexer"] = index.shape[-1]
    convs = getattr(layer, "conv_states", {})
    if name == "qwen4_exp_text":
        convs = {number: state for number, state in convs.items() if number != 2}  # the ids of its last tokens
    found["convs"] = sum(state.shape[1] for state in convs.values() if state is not None)
    states = getattr(layer, "recurrent_states", {}).values()
    found["ssm"] = sum(state[0].numel() for state in states if state is not None)
    return found


def read_widths(name: str, model: Model, number: int) -> dict[str, int]:
    """The same, as kvferry has read it."""
    found = {"convs": 0, "ssm": 0}
    for group in model.groups:
        for part in group.parts if number in group.layers else ():
            elements = part.units * part.cell_elements
            if part.name.startswith("conv."):
                found["convs"] += elements
            elif part.name == "latent":  # the latent, and its rotated elements, which GLM 5 Next has none of
                found.update(keys=elements, values=0)
            elif part.name in ("indexer_key", "indexer_gate"):
                found["pending"] = found.get("pending", 0) + elements
            elif part.name != "indexer_scale":
                found[{"k": "keys", "v": "values"}.get(part.name, part.name)] = elements
    pending = found.pop("pending", None)
    if name == "glm5_next_text" and pending:
        found["indexer"] = pending + 1  # of all tokens, with a flag for each
    return found


class Caches(unittest.TestCase):
    """Tiny models, whose caches must have the shapes that were read."""

    def test_indexers_and_convolutions_have_the_widths_that_were_read(self) -> None:
        """transformers keeps each token's index key, also where engines keep one for several tokens."""
        full = {"indexer_types": ["full"] * LAYERS}
        names = ("minimax_m3_vl_text", "glm5_next_text", "qwen4_exp_text", "inkling_text")
        for name in names:
            config = tiny(name, **full)
            glm = name == "glm5_next_text"
            model = Glm5NextTextModel(config) if glm else AutoModelForCausalLM.from_config(config)
            cache = run(config, model)
            read_as = read(save(config))
            kept_things = set()
            for number, layer in enumerate(cache.layers):
                with self.subTest(name, layer=number):
                    found = found_widths(name, layer)
                    self.assertEqual(read_widths(name, read_as, number), found)
                    kept_things |= {thing for thing, width in found.items() if width}
            self.assertIn("convs" if name == "inkling_text" else "indexer", kept_things)

    def test_the_cache_of_a_model_has_the_heads_that_were_read(self) -> None:
        for name in WITH_HEADS:
            with self.subTest(name):
                config = tiny(name)
                cache = run(config, AutoModelForCausalLM.from_config(config))
                shapes = {
                    layer: (tuple(one.keys.shape), tuple(one.values.shape))
                    for layer, one in enumerate(cache.layers)
                    if one.keys is not None
                }
                read_as = {}
                for group in read(save(config)).groups:
                    key, value = group.parts
                    for layer in group.layers:
                        read_as[layer] = (
                            (1, key.units, TOKENS, key.cell_elements),
                            (1, value.units, TOKENS, value.cell_elements),
                        )
                self.assertEqual(read_as, shapes)


if __name__ == "__main__":
    unittest.main()
