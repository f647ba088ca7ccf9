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
    """

    class_name: str
    norms: bool = False
    bias: bool = False
    size: int = 32
    windowed: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """How many."""
        return 6 if self.windowed else 4


#: By their architecture in a GGUF file, which is also the model_type of the configuration, and their purpose.
MODELS = {
    "llama": Tiny("LlamaForCausalLM"),
    "llama.rotated": Tiny("LlamaForCausalLM", size=64),  # if it is quantized
    "qwen2": Tiny("Qwen2ForCausalLM", bias=True),
    "qwen3": Tiny("Qwen3ForCausalLM", norms=True),
    "gemma3": Tiny("Gemma3ForCausalLM", norms=True, windowed=(0, 1, 3, 4)),
}
WINDOW = 16
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
    is_gemma = name == "gemma3"
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(file), name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    if is_gemma:
        writer.add_sliding_window(config["sliding_window"])
        period = config["layer_types"].index("full_attention") + 1
        writer.add_uint32(f"{name}.attention.sliding_window_pattern", period)
        rope = rope["full_attention"]  # those with a window have 10000, which llama.cpp assumes
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config["vocab_size"])
    _add_words(writer, config["vocab_size"])
    for key, tensor in load_file(folder / "model.safetensors").items():
        base, _, kind = key.rpartition(".")
        if is_gemma and base.endswith("norm"):
            tensor = tensor + 1  # llama.cpp multiplies by the weight alone
        if base in WHOLE:
            writer.add_tensor(f"{WHOLE[base]}.{kind}", tensor)
            continue
        _, _, layer, inner = base.split(".", 3)
        if name in INTERLEAVED and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = tensor.reshape(-1, 2, size // 2, tensor.shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        target = GEMMA.get(inner, "") if is_gemma else ""
        writer.add_tensor(f"blk.{layer}.{target or LAYER[inner]}.{kind}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_words(writer: gguf.GGUFWriter, count: int) -> None:
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
            "self_attn.q_proj.weight": matrix(HEADS * size, HIDDEN),
            "self_attn.k_proj.weight": matrix(KV_HEADS * size, HIDDEN),
            "self_attn.v_proj.weight": matrix(KV_HEADS * size, HIDDEN),
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * size),
            "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, INNER),
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
