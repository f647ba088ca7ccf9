"""Models as GGUF files: converted from a folder of Hugging Face's form, or tiny ones with random weights."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

VOCABULARY = 512
HEADS, KV_HEADS, HIDDEN, INNER = 8, 4, 256, 256

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Tiny:
    """A model.

    Attributes:
        norms: queries and keys are normalized, head by head
        bias: queries, keys and values have a bias
        size: elements of a head
        windowed: layers with a sliding window
        latent: elements of a latent without what is rotated; 0: layers keep keys and values
    """

    class_name: str
    norms: bool = False
    bias: bool = False
    size: int = 32
    windowed: tuple[int, ...] = ()
    latent: int = 0

    @property
    def layers(self) -> int:
        """How many."""
        return 6 if self.windowed else 4


#: By their architecture in a GGUF file, and their purpose.
MODELS = {
    "llama": Tiny("LlamaForCausalLM"),
    "llama.rotated": Tiny("LlamaForCausalLM", size=64),  # if it is quantized
    "qwen2": Tiny("Qwen2ForCausalLM", bias=True),
    "qwen3": Tiny("Qwen3ForCausalLM", norms=True),
    "gemma3": Tiny("Gemma3ForCausalLM", norms=True, windowed=(0, 1, 3, 4)),
    "deepseek2": Tiny("DeepseekV2ForCausalLM", latent=64),
}
ARCHITECTURES = {"deepseek_v2": "deepseek2"}  # where they are not the model_type of the configuration
WINDOW = 16
Q_LATENT, ROTATED = 96, 32
PROMPT = [(7 * i * i + 3 * i + 11) % 500 + 3 for i in range(70)]
#: Those of which llama.cpp wants the rows of queries and keys in another order.
INTERLEAVED = {"llama"}

#: Names in a checkpoint of a layer's tensors, and in a GGUF file.
LAYER = {
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
#: Names that Gemma gives another meaning, or has alone.
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
#: Names of the tensors around latents; that which makes keys and values of them is kept as two.
LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def make(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The GGUF file of a tiny model, made in a folder."""
    where = folder / name
    where.mkdir(parents=True)
    save_file(_weights(MODELS[name]), where / "model.safetensors")
    (where / "config.json").write_text(json.dumps(_configuration(name)))
    return convert(where, folder / f"{name}.gguf")


def convert(folder: pathlib.Path, file: pathlib.Path) -> pathlib.Path:
    """Writes the model in a folder as a GGUF file, with a word for each token; returns the file."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    name = config["model_type"].removesuffix("_text")
    name = ARCHITECTURES.get(name, name)
    writer = gguf.GGUFWriter(str(file), name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_sizes(writer, name, config)
    writer.add_vocab_size(config["vocab_size"])
    add_words(writer, config["vocab_size"])
    for key, tensor in load_file(folder / "model.safetensors").items():
        for target, content in _tensors(name, config, key, tensor):
            writer.add_tensor(target, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_sizes(writer: gguf.GGUFWriter, name: str, config: dict[str, Any]) -> None:
    """What layers keep, and how it is rotated."""
    rope = config["rope_parameters"]
    if name == "deepseek2":
        rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
        writer.add_head_count_kv(1)
        writer.add_kv_lora_rank(latent)
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_key_length(latent + rotated)
        writer.add_value_length(latent)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(rotated)
        writer.add_leading_dense_block_count(config["num_hidden_layers"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(0)
        writer.add_expert_weights_scale(1.0)
    else:
        size = _head_size(config)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(size)
    if name == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        period = config["layer_types"].index("full_attention") + 1
        writer.add_uint32(f"{name}.attention.sliding_window_pattern", period)
        rope = rope["full_attention"]  # those with a window have 10000, which llama.cpp assumes
    writer.add_rope_freq_base(rope["rope_theta"])


def _tensors(
    name: str, config: dict[str, Any], key: str, tensor: NDArray[np.float32]
) -> list[tuple[str, NDArray[np.float32]]]:
    """What becomes of a checkpoint's tensor: names in a GGUF file, and contents."""
    base, _, kind = key.rpartition(".")
    is_gemma = name == "gemma3"
    if is_gemma and base.endswith("norm"):
        tensor = tensor + 1  # llama.cpp multiplies by the weight alone
    if base in WHOLE:
        return [(f"{WHOLE[base]}.{kind}", tensor)]
    _, _, layer, inner = base.split(".", 3)
    if name in INTERLEAVED and inner in ("self_attn.q_proj", "self_attn.k_proj"):
        halves = tensor.reshape(-1, 2, _head_size(config) // 2, tensor.shape[1])
        tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    if inner == "self_attn.kv_b_proj":
        keys = config["qk_nope_head_dim"]
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        return [
            (f"blk.{layer}.attn_k_b.{kind}", np.ascontiguousarray(heads[:, :keys].swapaxes(1, 2))),
            (f"blk.{layer}.attn_v_b.{kind}", np.ascontiguousarray(heads[:, keys:])),
        ]
    target = (GEMMA.get(inner) if is_gemma else None) or {**LAYER, **LATENT}[inner]
    return [(f"blk.{layer}.{target}.{kind}", tensor)]


def add_words(writer: gguf.GGUFWriter, count: int) -> None:
    """A word for each token. Prompts are given as token ids anyway."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"▁w{token}" for token in range(3, count))])
    writer.add_token_scores([0.0] * count)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (count - 3)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _configuration(name: str) -> dict[str, object]:
    model = MODELS[name]
    rope: dict[str, object] = {"rope_theta": 10000.0}
    more: dict[str, object] = {}
    if model.windowed:
        rope = {"sliding_attention": rope, "full_attention": {"rope_theta": 1000000.0}}
        kinds = {True: "sliding_attention", False: "full_attention"}
        more = {
            "sliding_window": WINDOW,
            "layer_types": [kinds[layer in model.windowed] for layer in range(model.layers)],
        }
    if model.latent:
        more = {
            "model_type": "deepseek_v2",
            "q_lora_rank": Q_LATENT,
            "kv_lora_rank": model.latent,
            "qk_nope_head_dim": model.size,
            "qk_rope_head_dim": ROTATED,
            "v_head_dim": model.size,
        }
    return {
        "architectures": [model.class_name],
        "model_type": name.partition(".")[0],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": model.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": model.size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        **more,
    }


def _weights(model: Tiny) -> Weights:
    """By their names in a checkpoint. They are large, so that a wrong cache changes tokens."""
    random, size, mean = np.random.default_rng(7), model.size, 0 if model.windowed else 1

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return np.asarray(random.standard_normal((rows, columns)) * 2 / np.sqrt(columns), np.float32)

    def norm(count: int) -> NDArray[np.float32]:
        return np.asarray(mean + 0.1 * random.standard_normal(count), np.float32)

    found = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(model.layers):
        tensors = {
            "input_layernorm.weight": norm(HIDDEN),
            "post_attention_layernorm.weight": norm(HIDDEN),
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * size),
            "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
        if model.latent:
            tensors |= {
                "self_attn.q_a_proj.weight": matrix(Q_LATENT, HIDDEN),
                "self_attn.q_a_layernorm.weight": norm(Q_LATENT),
                "self_attn.q_b_proj.weight": matrix(HEADS * (size + ROTATED), Q_LATENT),
                "self_attn.kv_a_proj_with_mqa.weight": matrix(model.latent + ROTATED, HIDDEN),
                "self_attn.kv_a_layernorm.weight": norm(model.latent),
                "self_attn.kv_b_proj.weight": matrix(HEADS * 2 * size, model.latent),
            }
        else:
            tensors |= {
                "self_attn.q_proj.weight": matrix(HEADS * size, HIDDEN),
                "self_attn.k_proj.weight": matrix(KV_HEADS * size, HIDDEN),
                "self_attn.v_proj.weight": matrix(KV_HEADS * size, HIDDEN),
            }
        if model.windowed:
            for which in ("pre", "post"):
                tensors[f"{which}_feedforward_layernorm.weight"] = norm(HIDDEN)
        if model.norms:
            tensors |= {"self_attn.q_norm.weight": norm(size), "self_attn.k_norm.weight": norm(size)}
        if model.bias:
            for side, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                tensors[f"self_attn.{side}_proj.bias"] = norm(heads * size) - mean
        found |= {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}
    return found
