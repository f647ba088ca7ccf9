"""kvferry reads of a configuration what the models keep that vLLM serves on GPUs only.

As families_test.py, but layer by layer and part by part, for families with caches beside that of attention:
keys of indexers, what is yet to become a key or a latent, states, and the inputs of convolutions. Nothing was
computed: kernels have stand-ins, see meta_models.py.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import unittest
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from meta_models import EXPERTS, LATENT, LAYERS, Layer, Wanted, config_of, layers_of, read_model
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

from kvferry import Dtype

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
KINDS = {"head_dim": 20, "sliding_window": 48, "layer_types": [WINDOW, FULL, WINDOW]}
INDEXER = {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 128}
KDA = {"num_heads": 5, "head_dim": 12, "short_conv_kernel_size": 5}
DEEPSEEK = {
    **EXPERTS,
    **INDEXER,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 30,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 128,
    "hc_mult": 2,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 2,
    "swiglu_limit": 7.0,
    "num_hash_layers": 0,
    "expert_dtype": "fp8",
    "compress_rope_theta": 10000.0,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "bfloat16",
}


@dataclass
class Family:
    model_class: str  # of vLLM
    fields: dict[str, Any]  # beside those that most families have; null: the family has no such field
    changed: dict[str, Any]  # the control: the path of a field, and another value
    text: bool = False  # whether the file has these fields in a text_config
    block_size: int = 32


FAMILIES = {
    "longcat_flash": Family(
        "vllm.model_executor.models.longcat_flash:LongcatFlashForCausalLM",
        {
            **EXPERTS,
            **LATENT,
            "num_layers": LAYERS,
            "num_hidden_layers": None,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 1,
            "zero_expert_num": 1,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "attention_bias": False,
            "router_bias": False,
        },
        {"kv_lora_rank": 26},
    ),
    "muse_glimmer_text": Family(
        "vllm.model_executor.models.muse_glimmer:MuseGlimmerForCausalLM",
        {**KINDS, "no_rope_layers": [1, 0, 1]},
        {"head_dim": 24},
    ),
    "glm5_next_text": Family(
        "vllm.models.glm5next.common.model:Glm5NextForCausalLM",
        {
            **EXPERTS,
            **LATENT,
            **INDEXER,
            "num_key_value_heads": 6,
            "qk_rope_head_dim": 0,
            "mla_use_nope": True,
            "linear_head_dim": 12,
            "linear_num_heads": 5,
            "linear_conv_kernel_dim": 5,
            "index_kpool": 4,
            "indexer_rope_interleave": True,
            "layer_types": [LINEAR, FULL, LINEAR],
            "mlp_layer_types": ["dense"] * LAYERS,
            "mhc": False,
            "torch_dtype": "bfloat16",
        },
        {"index_kpool": 8},
        block_size=128,
    ),
    "qwen4_exp_text": Family(
        "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForCausalLM",
        {
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 6,
            "mamba_ssm_dtype": "float32",
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
            "layer_types": [LINEAR, FULL, LINEAR],
            "ple_layer_ids": [3],
            "ple_conv_kernel_size": 3,
            "ple_embed_dim": 96,
            "ngram_size": 4,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 100,
            "split_ngram_parts": 1,
            "hc_count": 2,
            "hc_lowrank": 8,
            "output_gate_type": "silu",
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "torch_dtype": "bfloat16",
        },
        {"ngram_size": 3},
    ),
    "minimax_m3_text": Family(
        "vllm.models.minimax_m3.nvidia.model:MiniMaxM3SparseForCausalLM",
        {
            "head_dim": 128,
            "rotary_dim": 64,
            "partial_rotary_factor": 0.5,
            "dense_intermediate_size": 32,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "moe_layer_freq": [0] * LAYERS,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.0,
            "swiglu_beta": 1.0,
            "swiglu_limit": 7.0,
            "scoring_func": "sigmoid",
            "use_gemma_norm": False,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": 64,
                "sparse_num_index_heads": 3,
                "sparse_topk_blocks": 16,
                "sparse_block_size": 128,
                "sparse_attention_freq": [0, 1, 1],
            },
            "torch_dtype": "bfloat16",
        },
        {"sparse_attention_config.sparse_attention_freq": [0, 0, 1]},
    ),
    "inkling_model": Family(
        "vllm.models.inkling.nvidia.model:InklingForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "swa_num_attention_heads": 6,
            "swa_num_key_value_heads": 3,
            "swa_head_dim": 20,
            "local_layer_ids": [0, 2],
            "sliding_window_size": 48,
            "use_sconv": True,
            "sconv_kernel_size": 5,
            "d_rel": 16,
            "rel_extent": 64,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "shared_expert_sink": True,
            "torch_dtype": "bfloat16",
        },
        {"sconv_kernel_size": 4},
    ),
    "kimi_k3": Family(
        "vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM",
        {
            **EXPERTS,
            **LATENT,
            "num_experts_per_token": 1,
            "mla_use_nope": True,
            "linear_attn_config": {**KDA, "kda_layers": [1, 3], "full_attn_layers": [2]},
        },
        {"text_config.linear_attn_config.short_conv_kernel_size": 4},
        text=True,
    ),
    "dots3_note": Family(
        "vllm.models.dots3_note.nvidia.model:Dots3NoteLanguageModelForCausalLM",
        {
            **EXPERTS,
            **LATENT,
            **INDEXER,
            "layer_types": [FULL, WINDOW, FULL],
            "sliding_window_size": 48,
            "swa_kv_lora_rank": 40,
            "swa_qk_rope_head_dim": 12,
            "swa_num_attention_heads": 6,
            "swa_num_key_value_heads": 6,
            "swa_v_head_dim": 18,
            "swa_qk_nope_head_dim": 14,
            "swa_q_lora_rank": 22,
            "swa_rope_theta": 10000.0,
            "attention_gate_type": "headwise",
            "swa_attention_gate_type": "headwise",
            "apply_mla_qkv_lora_rescale": False,
        },
        {"swa_qk_rope_head_dim": 14},
    ),
    "hy_v4": Family(
        "vllm.models.hy_v4.nvidia.model:HYV4ForCausalLM",
        {
            **EXPERTS,
            **LATENT,
            **INDEXER,
            "num_hidden_layers": 7,
            "layer_types": ["deepseek_sparse_attention"] * 7,
        },
        {"indexer_types": ["full"] * 7},
    ),
    "deepseek_v4": Family(
        "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM",
        {**DEEPSEEK, "compress_ratios": [0, 4, 128]},
        {"compress_ratios": [0, 128, 4]},
    ),
    "deepseek_v41": Family(
        "vllm.models.deepseek_v41.nvidia.model:DeepseekV41LLMForCausalLM",
        {
            **DEEPSEEK,
            "num_hidden_layers": 5,
            "compress_ratios": [0, 2, 2, 1, 1],
            "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3],
            "candidate_source_layer_id": -1,
            "engram_layer_ids": [],
        },
        {"text_config.kv_source_layer_ids": [1, 4], "text_config.index_source_layer_ids": [1, 4]},
        text=True,
    ),
    "step5": Family(
        "vllm.models.step5.nvidia.model:Step5ForCausalLM",
        {
            "moe_layers_enum": "",
            "num_attention_heads": 12,
            "num_key_value_heads": None,
            "num_attention_groups": 3,
            "head_dim": 192,
            "sliding_window": 48,
            "layer_types": [FULL, WINDOW, WINDOW],
            "use_head_wise_attn_gate": True,
            "attention_other_setting": {
                "attention_type": WINDOW,
                "num_attention_heads": 8,
                "num_attention_groups": 4,
                "head_dim": 128,
            },
            "sparse_config": {
                "enabled": True,
                "proxy_dim": 256,
                "region_block_size": 8,
                "sparse_indexer_num_heads": 6,
                "sparse_indexer_num_k_heads": 1,
                "sparse_indexer_rope_dim": 64,
                "index_tp_size": 3,
                "topk": 1024,
            },
            "torch_dtype": "bfloat16",
        },
        {"sparse_config.region_block_size": 4},
    ),
    "muse_spark_text": Family(
        "vllm.models.muse_spark.nvidia.model:MuseSpark1xForCausalLM",
        {
            **KINDS,
            "attention_bias": False,
            "num_shared_experts": 0,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "moe_hidden_size": 96,
            "moe_intermediate_size": 16,
            "mlp_layer_types": ["dense"] * LAYERS,
            "layer_rope_theta": [10000.0] * LAYERS,
            "post_norm_eps": 1e-5,
            "qk_scale_factor": 1.0,
            "output_multiplier": 1.0,
            "residual_gate_temperature": 1.0,
            "final_logit_softcapping": 1.0,
        },
        {"layer_types": [WINDOW, WINDOW, FULL]},
    ),
    "beam": Family(
        "vllm.models.beam.nvidia.model:BeamForCausalLM", {**EXPERTS, **KINDS}, {"sliding_window": 47}
    ),
    "flint": Family(
        "vllm.models.flint.model:FlintForCausalLM",
        {**EXPERTS, **KINDS, "torch_dtype": "bfloat16"},
        {"num_key_value_heads": 2},
    ),
}


class Part(NamedTuple):
    """One part of what a layer keeps."""

    name: str
    dtype: Dtype | None  # None: the engine's choice, whatever the model's type is
    window: int | None  # None: a ring, whose length depends on how many tokens are proposed
    tokens: int  # of a row
    units: int
    elements: int
    rows: int = 1


#: By layer. An attention of LongCat counts as a layer.
Kept = dict[int, Counter[Part]]
TYPES = {torch.float16: Dtype.F16, torch.bfloat16: Dtype.BF16, torch.float32: Dtype.F32}


# ---- what vLLM says ----------------------------------------------------------------------------------


def state_parts(spec: MambaSpec) -> list[Part]:
    """A convolution alone; or that of queries, keys and values, and a state of values by keys for each head."""
    dtypes = [TYPES[dtype] for dtype in spec.dtypes]
    rows, channels = spec.shapes[0]
    if len(spec.shapes) == 1:
        return [Part("conv.x", dtypes[0], 0, 1, channels, 1, rows)]
    heads, values, keys = spec.shapes[1]
    of_keys = (channels - heads * values) // 2
    split = {"conv.Q": of_keys, "conv.K": of_keys, "conv.V": heads * values}
    conv = [Part(name, dtypes[0], 0, 1, width, 1, rows) for name, width in split.items()]
    return [*conv, Part("ssm", dtypes[1], 0, 1, heads, values * keys)]


def ring_parts(layer: Layer, key_size: int) -> list[Part]:
    """Rows of a compressor; or of an indexer's keys, perhaps each with what weighs it."""
    spec = layer.spec
    if spec.dtype == torch.float32:
        return [Part("compressor", Dtype.F32, None, 1, 1, spec.head_size)]
    row = spec.num_kv_heads * spec.head_size
    if "capacity" in layer.attributes:  # Step 5: a page as large as that of attention has so many rows
        row = spec.page_size_bytes // layer.attributes["capacity"] // spec.dtype.itemsize
    names = ("indexer_key", "indexer_gate")[: row // key_size]
    assert row == len(names) * key_size
    return [Part(name, TYPES[spec.dtype], None, 1, 1, key_size) for name in names]


def indexer_parts(spec: Any) -> list[Part]:
    """Keys in the model's type; or in 8 bits, and then with a scale of 4 bytes for 128 elements, or without."""
    tokens = int(spec.tokens_per_state)
    if spec.dtype != torch.uint8:
        return [Part("indexer", TYPES[spec.dtype], 0, tokens, 1, spec.head_size)]
    scales = spec.head_size // 132
    if spec.head_size != scales * 132:
        return [Part("indexer", Dtype.F8_E4M3, 0, tokens, 1, spec.head_size)]
    return [
        Part("indexer", Dtype.F8_E4M3, 0, tokens, 1, scales * 128),
        Part("indexer_scale", Dtype.F32, 0, tokens, 1, scales),
    ]


def convolution_parts(layer: Layer) -> list[Part]:
    """Inkling: four convolutions have a range each of a KV head's row, whose end is without content."""
    spec, ranges = layer.spec, layer.attributes["stream_ranges"]
    assert spec.head_size >= sum(ranges[-1])
    names = ("conv.k", "conv.v", "conv.attn", "conv.mlp")
    return [
        Part(name, TYPES[spec.dtype], 0, 1, spec.num_kv_heads * width, 1, spec.sliding_window - 1)
        for name, (_, width) in zip(names, ranges, strict=True)
    ]


def latent_part(layer: Layer) -> Part:
    """dots3.note: rows are as wide as those of the widest latent, and the layer's own size is another."""
    spec = layer.spec
    size = layer.attributes["head_size"] if "physical_head_size" in layer.attributes else spec.head_size
    packed = spec.state_content_bytes is not None  # in 8 bits with scales
    window = spec.sliding_window or 0
    return Part("latent", None if packed else TYPES[spec.dtype], window, int(spec.tokens_per_state), 1, size)


def parts_of(name: str, layers: dict[str, Layer], key_size: int) -> list[Part]:
    layer = layers[name]
    spec = layer.spec
    if isinstance(spec, MambaSpec):
        return state_parts(spec)
    if isinstance(spec, CircularBufferSpec):
        return ring_parts(layer, key_size)
    if name.endswith(".compressor.state_cache"):
        part = "indexer_compressor" if ".indexer." in name else "compressor"
        return [Part(part, TYPES[spec.dtype], spec.sliding_window, 1, 1, spec.head_size)]
    if "stream_ranges" in layer.attributes:
        return convolution_parts(layer)
    if re.search(r"\.indexer\.|index_cache|summary", name):
        return indexer_parts(spec)
    if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
        return [latent_part(layer)]
    window, dtype = spec.sliding_window or 0, TYPES[spec.dtype]
    assert spec.tokens_per_state == 1
    return [
        Part("k", dtype, window, 1, spec.num_kv_heads, spec.head_size),
        Part("v", dtype, window, 1, spec.num_kv_heads, spec.head_size_v),
    ]


def key_size_of(layers: dict[str, Layer]) -> int:
    """Elements of an indexer's key, or 0: none has one. Rings have no size of their own for it."""
    held = {name: layer for name, layer in layers.items() if not isinstance(layer.spec, CircularBufferSpec)}
    sizes = {part.elements for name in held for part in parts_of(name, held, 0) if part.name == "indexer"}
    assert len(sizes) < 2
    return sizes.pop() if sizes else 0


def kept_by_vllm(layers: dict[str, Layer]) -> Kept:
    found: Kept = {}
    key_size = key_size_of(layers)
    for name in layers:
        number = int(re.findall(r"layers\.(\d+)\.", name)[0])
        if second := re.search(r"self_attn\.(\d)\.", name):  # LongCat
            number = 2 * number + int(second[1])
        found.setdefault(number, Counter()).update(parts_of(name, layers, key_size))
    return found


# ---- what kvferry reads ------------------------------------------------------------------------------


def kept_by_kvferry(config: dict[str, Any], there: Kept) -> Kept:
    """As vLLM tells it: what it leaves to the engine is left out here, too."""
    untyped = {part.name for parts in there.values() for part in parts if part.dtype is None}
    rings = {part.name for parts in there.values() for part in parts if part.window is None}
    found: Kept = {}
    for group in read_model(config).groups:
        for part in group.parts:
            told = Part(
                part.name,
                None if part.name in untyped else Dtype(part.dtype),
                None if part.name in rings else group.window_tokens,
                group.tokens_per_step,
                part.units,
                part.cell_elements,
                part.rows_per_step,
            )
            for layer in group.layers:
                found.setdefault(layer, Counter())[told] += 1
    return found


def config_for(name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    config = config_of(name, family.model_class.split(":")[1], family.fields)
    if not family.text:
        return config
    outer = {key: config.pop(key) for key in ("architectures", "model_type")}
    return {**outer, "text_config": config}


def changed(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    other = copy.deepcopy(config)
    for path, value in fields.items():
        *outer, last = path.split(".")
        inner = other
        for word in outer:
            inner = inner[word]
        inner[last] = value
    return other


def is_there(family: Family) -> bool:
    """Whether this vLLM has the family: some came with a later one."""
    package = ".".join(family.model_class.split(":")[0].split(".")[:3])
    return importlib.util.find_spec(package) is not None


class GpuFamilies(unittest.TestCase):
    maxDiff = None
    models: dict[str, dict[str, Layer] | str]

    @classmethod
    def setUpClass(cls) -> None:
        told = ("stream_ranges", "physical_head_size", "head_size", "capacity")
        cls.models = layers_of(
            {
                name: Wanted(
                    config_for(name), family.model_class, block_size=family.block_size, attributes=told
                )
                for name, family in FAMILIES.items()
                if is_there(family)
            }
        )

    def layers(self, name: str) -> dict[str, Layer]:
        found = self.models[name]
        if isinstance(found, str):
            self.fail(f"vLLM did not build the model: {found}")
        return found

    def test_a_layer_keeps_what_was_read(self) -> None:
        for name in self.models:
            with self.subTest(name):
                there = kept_by_vllm(self.layers(name))
                self.assertEqual(kept_by_kvferry(config_for(name), there), there)

    def test_another_configuration_is_not_what_vllm_keeps(self) -> None:
        """The control: something else is read, and no longer what the model keeps."""
        for name in self.models:
            with self.subTest(name):
                there = kept_by_vllm(self.layers(name))
                other = changed(config_for(name), FAMILIES[name].changed)
                self.assertNotEqual(kept_by_kvferry(other, there), there)

    def test_a_ring_has_room_for_the_window(self) -> None:
        """vLLM's rings hold at least the tokens that kvferry hands over."""
        rings = 0
        for name in self.models:
            windows = [
                group.window_tokens
                for group in read_model(config_for(name)).groups
                if group.name.endswith(".state")
            ]
            for layer in self.layers(name).values():
                if isinstance(layer.spec, CircularBufferSpec):
                    rings += 1
                    held = layer.attributes.get("capacity", layer.spec.block_size)
                    self.assertGreaterEqual(held, max(windows), name)
        self.assertGreater(rings, 0)

    def test_glm_5_next_by_hand(self) -> None:
        """So that the comparison is not one of nothing with nothing."""
        there = kept_by_vllm(self.layers("glm5_next_text"))
        self.assertEqual(
            there[1],
            Counter(
                [
                    Part("latent", Dtype.BF16, 0, 1, 1, 24),
                    Part("indexer", Dtype.F8_E4M3, 0, 4, 1, 128),
                    Part("indexer_scale", Dtype.F32, 0, 4, 1, 1),
                    Part("indexer_key", Dtype.BF16, None, 1, 1, 128),
                    Part("indexer_gate", Dtype.BF16, None, 1, 1, 128),
                ]
            ),
        )
        self.assertEqual(there[0], there[2])
        self.assertEqual(there[0][Part("conv.V", Dtype.BF16, 0, 1, 60, 1, 4)], 1)
        self.assertEqual(there[0][Part("ssm", Dtype.F32, 0, 1, 5, 144)], 1)


if __name__ == "__main__":
    unittest.main()
