"""Tiny models with random weights, saved once: both servers of a case load the same weights.

Weights are large enough that attention matters: with the usual small initial weights a wrong cache would change
no token, and the tests would prove nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Callable

import compressed
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"]


def llama() -> transformers.PretrainedConfig:
    """Grouped-query attention."""
    return transformers.LlamaConfig(**COMMON, head_dim=32, num_hidden_layers=4)


def llama_large() -> transformers.PretrainedConfig:
    """Caches of 128 KB for each token: copying them takes a while."""
    return transformers.LlamaConfig(
        **{**COMMON, "num_key_value_heads": 8, "max_position_embeddings": 4096},
        head_dim=128,
        num_hidden_layers=16,
    )


def llama_deep() -> transformers.PretrainedConfig:
    """Many layers, and long prompts that take seconds: to measure writing layer by layer."""
    return transformers.LlamaConfig(
        **{**COMMON, "hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": 16384},
        head_dim=32,
        num_hidden_layers=16,
    )


def llama_heads() -> transformers.PretrainedConfig:
    """Unlike llama(): heads of another size."""
    return transformers.LlamaConfig(**COMMON, head_dim=64, num_hidden_layers=4)


def llama_layers() -> transformers.PretrainedConfig:
    """Unlike llama(): fewer layers."""
    return transformers.LlamaConfig(**COMMON, head_dim=32, num_hidden_layers=3)


def llama_window() -> transformers.PretrainedConfig:
    """Unlike llama(): the same shape, but with a sliding window."""
    return transformers.MistralConfig(**COMMON, head_dim=32, num_hidden_layers=4, sliding_window=64)


def llama_scaled() -> transformers.PretrainedConfig:
    """llama(), with scales for a cache in FP8 as llm-compressor saves them, other ones in each layer."""
    return llama()


def llama_draft() -> transformers.PretrainedConfig:
    """Proposes tokens for llama(): fewer layers and heads, and smaller ones."""
    return transformers.LlamaConfig(
        **{**COMMON, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        head_dim=32,
        num_hidden_layers=2,
    )


def llama_eagle() -> transformers.PretrainedConfig:
    """Proposes tokens for llama() from its hidden states: a layer with other heads (EAGLE)."""
    return transformers.LlamaConfig(**{**COMMON, "num_key_value_heads": 2}, head_dim=32, num_hidden_layers=1)


def qwen3() -> transformers.PretrainedConfig:
    """Heads are normalized before they are cached."""
    return transformers.Qwen3Config(**COMMON, head_dim=32, num_hidden_layers=4)


def gemma3() -> transformers.PretrainedConfig:
    """Two layers with a sliding window for each without."""
    return transformers.Gemma3TextConfig(
        **COMMON,
        head_dim=32,
        num_hidden_layers=6,
        sliding_window=64,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        query_pre_attn_scalar=32,
    )


def gemma4() -> transformers.PretrainedConfig:
    """Like Gemma 4 26B: layers with a window have more and smaller heads, the others use keys as values."""
    return gemma4_with(full_heads=2)


def gemma4_one() -> transformers.PretrainedConfig:
    """One head in full layers: pages of two sizes, and two ranks hold copies of the head."""
    return gemma4_with(full_heads=1)


def gemma4_with(full_heads: int) -> transformers.PretrainedConfig:
    """Two layers with a sliding window for each without."""
    return transformers.Gemma4TextConfig(
        **COMMON,
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=full_heads,
        attention_k_eq_v=True,
        num_hidden_layers=6,
        sliding_window=64,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
    )


def gptoss() -> transformers.PretrainedConfig:
    """Alternating layers with and without a window, attention sinks, experts."""
    return transformers.GptOssConfig(
        **{**COMMON, "intermediate_size": 64},
        head_dim=64,
        num_hidden_layers=4,
        sliding_window=64,
        layer_types=ALTERNATING * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def deepseek() -> transformers.PretrainedConfig:
    """Latent attention, and experts."""
    return deepseek_with(queries=None, dense=1)


def deepseek_dense() -> transformers.PretrainedConfig:
    """Unlike deepseek(): queries have a latent, too, and no layer has experts."""
    return deepseek_with(queries=96, dense=3)


def deepseek_with(queries: int | None, dense: int) -> transformers.PretrainedConfig:
    """Latents of the published sizes, since kernels support no others.

    Args:
        queries: elements of their latent; None: they have none
        dense: the first layers, which have no experts
    """
    return transformers.DeepseekV2Config(
        **{**COMMON, "num_attention_heads": 16, "num_key_value_heads": 16},
        num_hidden_layers=3,
        kv_lora_rank=512,
        q_lora_rank=queries,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=dense,
        moe_intermediate_size=64,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    )


def glm_mtp() -> transformers.PretrainedConfig:
    """Grouped-query attention and experts, and a layer that proposes tokens (multi-token prediction)."""
    return transformers.Glm4MoeConfig(
        **COMMON,
        head_dim=32,
        num_hidden_layers=3,
        num_nextn_predict_layers=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
    )


def granite() -> transformers.PretrainedConfig:
    """Mamba 2 and attention."""
    return granite_with(heads=4)


def granite_one() -> transformers.PretrainedConfig:
    """One KV head: two ranks hold copies of it, beside halves of the states."""
    return granite_with(heads=1)


def granite_with(heads: int) -> transformers.PretrainedConfig:
    """One layer of attention among three of Mamba 2."""
    return transformers.GraniteMoeHybridConfig(
        **{**COMMON, "hidden_size": 256, "num_key_value_heads": heads},
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        mamba_n_heads=16,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_expand=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
    )


def lfm2() -> transformers.PretrainedConfig:
    """Short convolutions and attention: a state without a recurrent part."""
    return transformers.Lfm2Config(
        **{**COMMON, "hidden_size": 256},
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        conv_L_cache=4,
        conv_dim=256,
        block_dim=256,
    )


def qwen3next() -> transformers.PretrainedConfig:
    """Gated delta nets and attention; the CPU kernels need bfloat16, and delta nets with heads of 128.

    Attention has heads of 80: for these vLLM uses the same kernels with and without AMX, whose pages are known.
    """
    return transformers.Qwen3NextConfig(
        **{**COMMON, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
        head_dim=80,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
        num_hidden_layers=4,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    make.__name__: make
    for make in (
        llama,
        llama_large,
        llama_deep,
        llama_heads,
        llama_layers,
        llama_window,
        llama_scaled,
        llama_draft,
        llama_eagle,
        qwen3,
        gemma3,
        gemma4,
        gemma4_one,
        gptoss,
        deepseek,
        deepseek_dense,
        glm_mtp,
        granite,
        granite_one,
        lfm2,
        qwen3next,
    )
}


def save_tokenizer(folder: pathlib.Path) -> None:
    """A word for each token, `w17` for 17: prompts are given as token ids anyway."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def save_model(name: str, folder: pathlib.Path) -> None:
    """Draws the weights, the same every time, and saves the model."""
    if name == compressed.NAME:
        compressed.save(folder)
        save_tokenizer(folder)
        return
    torch.manual_seed(1)
    dtype = torch.bfloat16 if name in ("qwen3next",) else torch.float32
    config = MODELS[name]()
    own = config.num_hidden_layers
    if name == "glm_mtp":  # the layer that proposes has the name of a further layer
        config.num_hidden_layers += config.num_nextn_predict_layers
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for weight, value in model.named_parameters():
            if value.dim() >= 2:
                looks = any(word in weight for word in ("q_proj", "k_proj"))
                value.normal_(0, (3 if looks else 1) / math.sqrt(value.shape[-1]))
    weights = None  # the model's
    if name == "llama_eagle":
        weights = eagle_weights(model)
    if name == "glm_mtp":
        weights = model.state_dict() | proposing_weights(model, own)
        model.config.num_hidden_layers = own
    if name == "llama_scaled":
        weights = model.state_dict() | cache_scales(own)
    model.save_pretrained(folder, state_dict=weights)
    if name == "llama_scaled":
        save_scheme(folder)
    save_tokenizer(folder)


def cache_scales(layers: int) -> dict[str, torch.Tensor]:
    """Scales of keys and of values: powers of two, which change no number."""
    return {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([0.5 ** (layer + more)])
        for layer in range(layers)
        for part, more in (("k", 0), ("v", 1))
    }


def save_scheme(folder: pathlib.Path) -> None:
    """Adds to a saved configuration that the checkpoint has scales, and weights as they were."""
    file = folder / "config.json"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    how = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": how}))


def proposing_weights(model: torch.nn.Module, layer: int) -> dict[str, torch.Tensor]:
    """What a layer for multi-token prediction has beside a layer of the model: norms, the matrix that joins a
    token with a hidden state, and copies of the model's first and last matrix."""
    own = model.state_dict()
    hidden = COMMON["hidden_size"]
    found = {
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": torch.randn(hidden, 2 * hidden) / math.sqrt(2 * hidden),
        "shared_head.norm.weight": torch.ones(hidden),
        "shared_head.head.weight": own["lm_head.weight"].clone(),
        "embed_tokens.weight": own["model.embed_tokens.weight"].clone(),
    }
    return {f"model.layers.{layer}.{weight}": value for weight, value in found.items()}


def eagle_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's layers under the names of EAGLE, with the matrix that joins a token with a hidden state.

    EAGLE has no norm before its first layer and after its last, and takes the output matrix of the model for
    which it proposes tokens.
    """
    without = ("model.layers.0.input_layernorm.weight", "model.norm.weight", "lm_head.weight")
    found = {
        name.removeprefix("model."): weight
        for name, weight in model.state_dict().items()
        if name not in without
    }
    hidden = COMMON["hidden_size"]
    return found | {"fc.weight": torch.randn(hidden, 2 * hidden) / math.sqrt(2 * hidden)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="model", help="by default all of them")
    given = parser.parse_args()
    for name in given.names or (*MODELS, compressed.NAME):
        folder = given.folder / name
        if not (folder / "tokenizer.json").exists():
            save_model(name, folder)
            print(f"made {folder}")


if __name__ == "__main__":
    main()
