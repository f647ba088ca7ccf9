"""kvferry reads of a configuration what vLLM's own model of it keeps.

vLLM builds a small model of each family without weights (on torch's meta device), and its layers say what they
keep (`get_kv_cache_spec()`): heads, their size, windows, states. No two sizes of a configuration are equal.
This is the check for families that transformers has no class for, and a second one for some that it has.
"""

from __future__ import annotations

import re
import unittest
from collections import Counter
from typing import Any

import meta_models
from meta_models import EXPERTS, LATENT, LAYERS, Layer, Wanted, layers_of, read_model
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

from kvferry import Dtype

BAILING = {**EXPERTS, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0}


def block(group: int | None) -> dict[str, Any]:
    """A block in which so many query heads share a KV head, or that has no attention."""
    attention = {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False}
    return {"attention": attention, "ffn": {"ffn_mult": 1.0, "no_op": False}}


# The class of vLLM, and the fields beside SIZES; null: the family has no such field.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm2": ("InternLM2ForCausalLM", {"bias": False}),
    "internlm3": ("InternLM3ForCausalLM", {"head_dim": 20, "qkv_bias": False, "bias": False}),
    "minicpm": (
        "MiniCPMForCausalLM",
        {"scale_depth": 1.4, "scale_emb": 12, "dim_model_base": 32, "num_experts": 0},
    ),
    "deepseek": ("DeepseekForCausalLM", EXPERTS),
    "orion": ("OrionForCausalLM", {}),
    "iquestcoder": ("IQuestCoderForCausalLM", {"head_dim": 20}),
    "bailing_moe": ("BailingMoeForCausalLM", {**BAILING, "head_dim": 20}),
    "bailing_moe_v2": ("BailingMoeV2ForCausalLM", {**BAILING, "head_dim": None}),
    "sarvam_moe": ("SarvamMoEForCausalLM", {**BAILING, "head_dim": 20}),
    "sarvam_mla": ("SarvamMLAForCausalLM", {**EXPERTS, **LATENT}),
    "param2moe": ("Param2MoEForCausalLM", {**EXPERTS, "head_dim": 20}),
    "PanguEmbedded": ("PanguEmbeddedForCausalLM", {"bias": False}),
    "pangu_ultra_moe": ("PanguUltraMoEForCausalLM", {**EXPERTS, **LATENT, "sandwich_norm": True}),
    "telechat": (
        "TeleChat2ForCausalLM",
        {
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "rms_norm_eps": None,
            "n_layer": LAYERS,
            "n_head": 6,
            "ffn_hidden_size": 32,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "exaone": (
        "ExaoneForCausalLM",
        {"num_layers": LAYERS, "activation_function": "silu", "layer_norm_epsilon": 1e-5},
    ),
    "chatglm": (
        "ChatGLMModel",
        {
            "num_hidden_layers": None,
            "num_key_value_heads": None,
            "num_layers": LAYERS,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 16,
            "padded_vocab_size": 64,
            "ffn_hidden_size": 32,
            "original_rope": True,
        },
    ),
    "step1": ("Step1ForCausalLM", {"num_key_value_heads": None, "num_attention_groups": 3}),
    "step3_text": (
        "Step3TextForCausalLM",
        {
            "num_key_value_heads": None,
            "num_attention_groups": 1,
            "head_dim": 20,
            "share_q_dim": 40,
            "moe_layers_enum": "1",
            "moe_intermediate_size": 16,
            "moe_num_experts": 2,
            "moe_top_k": 1,
            "share_expert_dim": 16,
            "max_position_embedding": 128,
            "norm_expert_weight": False,
        },
    ),
    "mimo": ("MiMoForCausalLM", {"num_nextn_predict_layers": 1, "sliding_window": 48}),
    "nemotron-nas": (
        "DeciLMForCausalLM",
        {"num_key_value_heads": None, "block_configs": [block(2), block(None), block(3)]},
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "num_hidden_layers": None,
            "hidden_size": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "d_model": 96,
            "n_layers": LAYERS,
            "n_heads": 6,
            "attn_config": {"kv_n_heads": 3, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            "num_key_value_heads": 6,
            "attention_head_dim": 32,
            "attention_hidden_size": 192,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
            "mamba_d_state": 9,
            "mamba_d_conv": 5,
            "mamba_expand": 3,
            "mamba_ngroups": 4,
            "n_mamba_heads": 12,
            "mamba_headdim": 24,
            "hidden_act": "gelu",
        },
    ),
    "telechat3": ("TeleChat3ForCausalLM", {"head_dim": 20}),
    "TeleFLM": ("TeleFLMForCausalLM", {"num_key_value_heads": None, "use_mup": False}),
    "k2_horizon": (
        "K2HorizonForCausalLM",
        {
            "head_dim": 20,
            "rope_head_dim": 10,
            "query_key_norm": True,
            "attention_bias": False,
            "attention_gate_func": "silu",
            "layernorm_num_groups": 1,
            "decoder_sparse_step": 1,
            "num_experts": 0,
            "mova_num_experts": 0,
        },
    ),
    "iquestloopcoder": ("IQuestLoopCoderForCausalLM", {"loop_num": 3, "loop_window_size": 48}),
    "RefinedWebModel": (
        "FalconForCausalLM",
        {
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "n_layer": LAYERS,
            "n_head": 6,
            "multi_query": True,
            "parallel_attn": True,
        },
    ),
    "molmo": (
        "MolmoForCausalLM",
        {
            "qkv_bias": True,
            "attention_layer_norm": False,
            "layer_norm_type": "rms",
            "layer_norm_eps": 1e-5,
            "norm_after": False,
            "embedding_size": 64,
            "additional_vocab_size": 8,
            "weight_tying": False,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**EXPERTS, "use_mla": False, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0},
    ),
    "bailing_hybrid": (
        "BailingMoeV3ForCausalLM",
        {
            **BAILING,
            **LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 4,
            "head_dim": 20,
            "v_head_dim": 20,
            "layer_group_size": 2,
            "short_conv_kernel_size": 5,
            "moe_shared_expert_intermediate_size": 16,
            "no_kda_lora": True,
            "kda_safe_gate": False,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {"num_key_value_heads": None}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 48}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**EXPERTS, **LATENT}),
    "granite": (
        "GraniteForCausalLM",
        {"logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
    ),
}

# The fields that are changed for the control: the first one that a configuration has.
CHANGED = ("mamba_d_state", "kv_lora_rank", "head_dim", "multi_query_group_num", "num_attention_groups")

# A layer's cache: its window, and the name, units, elements of a cell and rows of each part.
Kept = Counter[tuple[int, tuple[tuple[str, int, int, int], ...]]]


def config_of(family: str) -> dict[str, Any]:
    return meta_models.config_of(family, *FAMILIES[family])


ON_CPU = {"step1"}  # it copies values of a tensor
DELTA = {"bailing_hybrid"}  # its recurrent state is in single precision


def state_parts(shapes: tuple[tuple[int, ...], ...], config: dict[str, Any]) -> tuple[Any, ...]:
    """Mamba 2: inputs of the convolution, of which two parts have as many channels as groups have states.
    Delta attention: three parts as wide as the heads together."""
    (rows, channels), (heads, width, size) = shapes
    if config["model_type"] in DELTA:
        convs = tuple((f"conv.{letter}", channels // 3, 1, rows) for letter in "QKV")
        return (*convs, ("ssm", heads, width * size, 1))
    groups = config["mamba_ngroups"] * size
    split = (("conv.x", channels - 2 * groups), ("conv.B", groups), ("conv.C", groups))
    return (*((name, units, 1, rows) for name, units in split), ("ssm", heads, width * size, 1))


def kept_by_vllm(layers: dict[str, Layer], config: dict[str, Any]) -> tuple[Kept, set[int]]:
    """How many layers keep what, and the numbers of the layers with attention that have their own name."""
    found: Kept = Counter()
    numbers: set[int] = set()
    for name, layer in layers.items():
        spec = layer.spec
        if isinstance(spec, MambaSpec):
            found[(0, state_parts(spec.shapes, config))] += 1
            continue
        if isinstance(spec, MLAAttentionSpec):
            parts: tuple[Any, ...] = (("latent", spec.num_kv_heads, spec.head_size, 1),)
        else:
            parts = (
                ("k", spec.num_kv_heads, spec.head_size, 1),
                ("v", spec.num_kv_heads, spec.head_size_v, 1),
            )
        found[(spec.sliding_window or 0, parts)] += 1
        numbers.update(int(number) for number in re.findall(r"\.(\d+)\.", name)[:1])
    return found, numbers


def kept_by_kvferry(config: dict[str, Any]) -> tuple[Kept, set[int]]:
    found: Kept = Counter()
    numbers: set[int] = set()
    for group in read_model(config).groups:
        parts = tuple((part.name, part.units, part.cell_elements, part.rows_per_step) for part in group.parts)
        found[(group.window_tokens, parts)] += len(group.layers)
        if group.name not in ("ssm", "kda"):
            numbers.update(group.layers)
        for part in group.parts:
            single = part.name == "ssm" and config["model_type"] in DELTA
            assert Dtype(part.dtype) == (Dtype.F32 if single else Dtype.F16)
    return found, numbers


class Families(unittest.TestCase):
    maxDiff = None
    models: dict[str, dict[str, Layer] | str]

    @classmethod
    def setUpClass(cls) -> None:
        cls.models = layers_of(
            {
                family: Wanted(config_of(family), device="cpu" if family in ON_CPU else "meta")
                for family in FAMILIES
            }
        )

    def kept_there(self, family: str) -> tuple[Kept, set[int]]:
        layers = self.models[family]
        if isinstance(layers, str):
            self.fail(f"vLLM did not build the model: {layers}")
        return kept_by_vllm(layers, config_of(family))

    def test_a_layer_keeps_what_was_read(self) -> None:
        for family in FAMILIES:
            with self.subTest(family):
                config = config_of(family)
                kept, numbers = kept_by_kvferry(config)
                kept_there, numbers_there = self.kept_there(family)
                self.assertEqual(kept, kept_there)
                if family != "zamba2":  # its attention is numbered by itself: "model.attn.0"
                    self.assertEqual(numbers, numbers_there)

    def test_a_family_with_a_window_keeps_it(self) -> None:
        """By hand: so the comparison above is not one of nothing with nothing."""
        kept, _ = self.kept_there("phi3")
        self.assertEqual(kept, {(48, (("k", 3, 16, 1), ("v", 3, 16, 1))): LAYERS})

    def test_blocks_differ_in_their_heads(self) -> None:
        """By hand: six heads in groups of two and of three, and a layer without attention."""
        for kept, numbers in (
            kept_by_kvferry(config_of("nemotron-nas")),
            self.kept_there("nemotron-nas"),
        ):
            self.assertEqual(numbers, {0, 2})
            self.assertEqual(
                kept,
                {(0, (("k", 3, 16, 1), ("v", 3, 16, 1))): 1, (0, (("k", 2, 16, 1), ("v", 2, 16, 1))): 1},
            )

    def test_another_size_is_not_what_vllm_keeps(self) -> None:
        """The control: if one size that is read changes, no family matches its model."""
        for family in (
            "internlm2",
            "bailing_moe",
            "sarvam_mla",
            "bailing_hybrid",
            "chatglm",
            "step1",
            "zamba2",
            "dbrx",
        ):
            with self.subTest(family):
                other = config_of(family)
                field = next((field for field in CHANGED if other.get(field)), None)
                if field:
                    other[field] = 1 if "group" in field else other[field] * 2
                elif family == "dbrx":
                    other["attn_config"]["kv_n_heads"] = 2
                else:
                    other["num_key_value_heads"] = 2
                self.assertNotEqual(kept_by_kvferry(other)[0], self.kept_there(family)[0])


if __name__ == "__main__":
    unittest.main()
