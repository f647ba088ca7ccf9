"""A tiny DeepSeek V4 with random weights, under the names of its published checkpoints.

vLLM reads these names and no others, so the model is saved without transformers. Heads, experts and indexers
have the published sizes, since kernels support no others; its layers are of all kinds: with a window only, and
with an entry for 4 and for 128 tokens. Weights are not quantised: quantised ones need AMX.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file

NAME = "deepseek4"

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "expert_dtype": "fp8",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Weights(dict[str, torch.Tensor]):
    """Weights by their names, drawn as they are named."""

    def draw(self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        """A matrix whose products with normal vectors are about as long as these, times `scale`."""
        self[name] = (torch.randn(*shape) * scale / math.sqrt(shape[-1])).to(dtype)

    def offsets(self, name: str, *shape: int) -> None:
        """Small numbers."""
        self[name] = torch.randn(*shape) * 0.1

    def norm(self, name: str, size: int, value: float = 1.0) -> None:
        """The weights of a norm."""
        self[name] = torch.full((size,), value, dtype=torch.bfloat16)


def draw_compressor(found: Weights, name: str, ratio: int, size: int) -> None:
    """A compressor into entries of `size` elements; those for 4 tokens overlap, and have weights for two."""
    width = size * (2 if ratio == 4 else 1)
    for matrix in ("wkv", "wgate"):
        found.draw(f"{name}.{matrix}.weight", width, CONFIG["hidden_size"])
    found.offsets(f"{name}.ape", ratio, width)
    found.norm(f"{name}.norm.weight", size)


def draw_attention(found: Weights, name: str, ratio: int) -> None:
    """The attention of a layer. Keys are long, so that it looks at few tokens and a wrong one matters."""
    hidden, size, heads, rank = (
        CONFIG[field] for field in ("hidden_size", "head_dim", "num_attention_heads", "q_lora_rank")
    )
    groups, rank_out = CONFIG["o_groups"], CONFIG["o_lora_rank"]
    found.draw(f"{name}.wq_a.weight", rank, hidden)
    found.norm(f"{name}.q_norm.weight", rank)
    found.draw(f"{name}.wq_b.weight", heads * size, rank)
    found.draw(f"{name}.wkv.weight", size, hidden)
    found.norm(f"{name}.kv_norm.weight", size, 2.0)
    found.draw(f"{name}.wo_a.weight", groups * rank_out, heads * size // groups)
    found.draw(f"{name}.wo_b.weight", hidden, groups * rank_out, scale=4.0)
    found.offsets(f"{name}.attn_sink", heads)
    if ratio:
        draw_compressor(found, f"{name}.compressor", ratio, size)
    if ratio == 4:
        index_size = CONFIG["index_head_dim"]
        found.draw(f"{name}.indexer.wq_b.weight", CONFIG["index_n_heads"] * index_size, rank)
        found.draw(f"{name}.indexer.weights_proj.weight", CONFIG["index_n_heads"], hidden)
        draw_compressor(found, f"{name}.indexer.compressor", ratio, index_size)


def draw_experts(found: Weights, name: str) -> None:
    """The experts of a layer, and what chooses among them."""
    hidden, inner, count = (
        CONFIG[field] for field in ("hidden_size", "moe_intermediate_size", "n_routed_experts")
    )
    found.draw(f"{name}.gate.weight", count, hidden)
    found.offsets(f"{name}.gate.bias", count)
    for expert in [*(f"experts.{i}" for i in range(count)), "shared_experts"]:
        for matrix, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            found.draw(f"{name}.{expert}.{matrix}.weight", *shape)


def draw() -> Weights:
    """All weights. Several residual streams are mixed before and after each part of a layer."""
    hidden, streams = CONFIG["hidden_size"], CONFIG["hc_mult"]
    mixes = (2 + streams) * streams
    found = Weights()
    found.draw("embed.weight", CONFIG["vocab_size"], hidden, scale=math.sqrt(hidden))
    found.draw("head.weight", CONFIG["vocab_size"], hidden)
    found.norm("norm.weight", hidden)
    found.draw("hc_head_fn", streams, streams * hidden, dtype=torch.float32)
    found.offsets("hc_head_base", streams)
    found["hc_head_scale"] = torch.ones(1)
    for i, ratio in enumerate(CONFIG["compress_ratios"]):
        layer = f"layers.{i}"
        draw_attention(found, f"{layer}.attn", ratio)
        draw_experts(found, f"{layer}.ffn")
        for part in ("attn", "ffn"):
            found.norm(f"{layer}.{part}_norm.weight", hidden)
            found.draw(f"{layer}.hc_{part}_fn", mixes, streams * hidden, dtype=torch.float32)
            found.offsets(f"{layer}.hc_{part}_base", mixes)
            found[f"{layer}.hc_{part}_scale"] = torch.ones(3)
    return found


def save(folder: pathlib.Path) -> None:
    """Saves the model, without a tokenizer."""
    torch.manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(draw(), folder / "model.safetensors", metadata={"format": "pt"})
