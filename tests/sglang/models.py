"""Tiny models with random weights, saved once: both servers of a case load the same weights.

Weights are large enough that attention matters: with the usual small initial weights a wrong cache would change
no token, and the tests would prove nothing.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> transformers.PretrainedConfig:
    """Grouped-query attention."""
    return transformers.LlamaConfig(**COMMON)


def llama_layers() -> transformers.PretrainedConfig:
    """Unlike llama(): fewer layers."""
    return transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 3})


def qwen3() -> transformers.PretrainedConfig:
    """Heads are normalized before they are cached."""
    return transformers.Qwen3Config(**COMMON)


def llama_one() -> transformers.PretrainedConfig:
    """Unlike llama(): one layer, which a draft model can have, too."""
    return transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 1})


def latents() -> transformers.PretrainedConfig:
    """Multi-head latent attention, without experts."""
    return transformers.DeepseekV2Config(
        **{**COMMON, "num_key_value_heads": 8, "num_hidden_layers": 3},
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=3,
        moe_layer_freq=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    )


def windows() -> transformers.PretrainedConfig:
    """Layers with a sliding window, in a pool of their own."""
    return transformers.Gemma4TextConfig(
        **{**COMMON, "num_hidden_layers": 6},
        global_head_dim=COMMON["head_dim"],
        sliding_window=64,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
        swa_num_key_value_heads=COMMON["num_key_value_heads"],  # SGLang's name, which transformers passes over
        swa_head_dim=COMMON["head_dim"],
    )


def states() -> transformers.PretrainedConfig:
    """States of gated delta nets beside attention, in layers with experts."""
    return transformers.Qwen3NextConfig(
        **{**COMMON, "num_hidden_layers": 6},
        full_attention_interval=3,  # SGLang's name, which transformers passes over
        layer_types=(["linear_attention"] * 2 + ["full_attention"]) * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


MODELS = {
    "llama": llama,
    "llama-layers": llama_layers,
    "llama-one": llama_one,
    "qwen3": qwen3,
    "states": states,
    "latents": latents,
    "windows": windows,
}
EAGLE = "llama-one-eagle"


def make(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Saves a model in a folder of its name, unless it is there."""
    where = folder / name
    if (where / "complete").exists():
        return where
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 2 / math.sqrt(weight.shape[1]))
        embeddings = model.get_input_embeddings().weight
        if name == "llama-one":  # or its draft, which does not normalize them, would see others
            embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
    model.save_pretrained(where)
    (where / "complete").touch()
    return where


def make_eagle(folder: pathlib.Path) -> pathlib.Path:
    """Saves the draft model of "llama-one", which must be there, unless it is there.

    It is the model's own layer, and looks at tokens alone, not at what the model thinks of them. As EAGLE does,
    it sees no first token. So it mostly drafts what the model then gives, as long as it has what it has cached.
    """
    where = folder / EAGLE
    if (where / "config.json").exists():
        return where
    model = folder / "llama-one"
    weights = {
        name.removeprefix("model."): weight
        for name, weight in load_file(model / "model.safetensors").items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    size = COMMON["hidden_size"]
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    weights["fc.bias"] = torch.zeros(size)
    where.mkdir(exist_ok=True)
    save_file(weights, where / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLMEagle"]}))
    return where


if __name__ == "__main__":
    for name in MODELS:
        make(name, pathlib.Path(sys.argv[1]))
    make_eagle(pathlib.Path(sys.argv[1]))
