"""Tiny models with random weights, saved once: both servers of a case load the same weights.

Weights are large enough that attention matters: with the usual small initial weights a wrong cache would change
no token, and the tests would prove nothing.
"""

from __future__ import annotations

import math
import pathlib
import sys

import torch
import transformers

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


MODELS = {"llama": llama, "llama-layers": llama_layers, "qwen3": qwen3}


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
    model.save_pretrained(where)
    (where / "complete").touch()
    return where


if __name__ == "__main__":
    for name in MODELS:
        make(name, pathlib.Path(sys.argv[1]))
