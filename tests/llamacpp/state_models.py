"""Tiny models with random weights whose layers keep states, as GGUF files.

Their tensors have the names that llama.cpp reads; no checkpoint of another form is made of them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
from gguf_models import HEADS, HIDDEN, INNER, KV_HEADS, VOCABULARY, add_words
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]

SIZE = HIDDEN // HEADS  # elements of a head
WIDTH = 2 * HIDDEN  # channels of a state, as llama.cpp demands
DEPTH = 16  # numbers of each channel
KERNEL = 4  # of a convolution, which keeps one row less
STEP_RANK = 24
#: Of gated delta nets: heads of queries and keys, heads of values, and elements of each.
DELTA_KEYS, DELTA_VALUES, DELTA_SIZE = 2, 4, 32
EXPERTS = 2  # which all compute


@dataclass(frozen=True)
class Tiny:
    """A model.

    Attributes:
        layers: "a" for one with keys and values, "s" for one with a state
        short: states are those of a short convolution alone, as wide as the model
        delta: states are those of gated delta nets, and networks behind have experts
        mlp: layers have a feed-forward network behind
    """

    layers: str
    short: bool = False
    delta: bool = False
    mlp: bool = True

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of what llama.cpp calls r and s of a layer."""
        if self.delta:
            channels = (2 * DELTA_KEYS + DELTA_VALUES) * DELTA_SIZE
            return (KERNEL - 1) * channels, DELTA_VALUES * DELTA_SIZE * DELTA_SIZE
        return ((KERNEL - 1) * HIDDEN, 0) if self.short else ((KERNEL - 1) * WIDTH, DEPTH * WIDTH)


#: By their architecture in a GGUF file.
MODELS = {
    "mamba": Tiny("sss", mlp=False),
    "jamba": Tiny("sassa"),
    "lfm2": Tiny("ssasa", short=True),
    "qwen3next": Tiny("ssassa", delta=True),
}


def make(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The GGUF file of a tiny model, made in a folder."""
    model, file = MODELS[name], folder / f"{name}.gguf"
    attention = [kind == "a" for kind in model.layers]
    writer = gguf.GGUFWriter(str(file), name)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER if model.mlp else 0)
    writer.add_block_count(len(model.layers))
    writer.add_head_count(HEADS if any(attention) else 0)
    writer.add_layer_norm_rms_eps(1e-6)
    if model.delta:
        _add_delta_nets(writer, model)
    elif any(attention):
        writer.add_head_count_kv([KV_HEADS if has else 0 for has in attention])
    if model.short:
        writer.add_shortconv_l_cache(KERNEL)
        writer.add_rope_freq_base(10000.0)
    elif not model.delta:
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_inner_size(WIDTH)
        writer.add_ssm_state_size(DEPTH)
        writer.add_ssm_time_step_rank(STEP_RANK)
    writer.add_vocab_size(VOCABULARY)
    add_words(writer, VOCABULARY)
    for key, tensor in _weights(model).items():
        writer.add_tensor(key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_delta_nets(writer: gguf.GGUFWriter, model: Tiny) -> None:
    """Here every so many layers one has keys and values."""
    writer.add_full_attention_interval(model.layers.index("a") + 1)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(SIZE)
    writer.add_value_length(SIZE)
    writer.add_rope_dimension_count(SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(DELTA_VALUES * DELTA_SIZE)
    writer.add_ssm_state_size(DELTA_SIZE)
    writer.add_ssm_time_step_rank(DELTA_VALUES)
    writer.add_ssm_group_count(DELTA_KEYS)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_expert_shared_feed_forward_length(INNER)


def _weights(model: Tiny) -> Tensors:
    """By their names in a GGUF file. They are large, so that a wrong cache changes tokens."""
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int, scale: float = 2) -> NDArray[np.float32]:
        return np.asarray(random.standard_normal((rows, columns)) * scale / np.sqrt(columns), np.float32)

    def vector(count: int, mean: float = 1) -> NDArray[np.float32]:
        return np.asarray(mean + 0.1 * random.standard_normal(count), np.float32)

    found = {
        "token_embd.weight": matrix(VOCABULARY, HIDDEN),
        "token_embd_norm.weight" if model.short else "output_norm.weight": vector(HIDDEN),
        "output.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer, kind in enumerate(model.layers):
        tensors = {"attn_norm.weight": vector(HIDDEN)}
        if kind == "a":
            tensors |= _attention(matrix, vector, model.short or model.delta, 2 if model.delta else 1)
        elif model.short:
            tensors |= {
                "shortconv.conv.weight": matrix(HIDDEN, KERNEL),
                "shortconv.in_proj.weight": matrix(3 * HIDDEN, HIDDEN, 1),
                "shortconv.out_proj.weight": matrix(HIDDEN, HIDDEN),
            }
        elif model.delta:
            tensors |= _delta_net(matrix, vector)
        else:
            tensors |= _recurrent(matrix, vector, model.mlp)
        if model.delta:
            tensors |= _experts(matrix, vector)
        elif model.mlp:
            tensors |= {
                "ffn_norm.weight": vector(HIDDEN),
                "ffn_gate.weight": matrix(INNER, HIDDEN),
                "ffn_up.weight": matrix(INNER, HIDDEN),
                "ffn_down.weight": matrix(HIDDEN, INNER),
            }
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in tensors.items()}
    return found


def _attention(
    matrix: Callable[..., NDArray[np.float32]],
    vector: Callable[..., NDArray[np.float32]],
    norms: bool,
    queries: int,
) -> Tensors:
    """`queries` is 2 if there is a gate beside them."""
    found = {
        "attn_q.weight": matrix(queries * HEADS * SIZE, HIDDEN),
        "attn_k.weight": matrix(KV_HEADS * SIZE, HIDDEN),
        "attn_v.weight": matrix(KV_HEADS * SIZE, HIDDEN),
        "attn_output.weight": matrix(HIDDEN, HEADS * SIZE),
    }
    if norms:
        found |= {"attn_q_norm.weight": vector(SIZE), "attn_k_norm.weight": vector(SIZE)}
    return found


def _delta_net(
    matrix: Callable[..., NDArray[np.float32]], vector: Callable[..., NDArray[np.float32]]
) -> Tensors:
    values = DELTA_VALUES * DELTA_SIZE
    channels = 2 * DELTA_KEYS * DELTA_SIZE + values
    return {
        "attn_qkv.weight": matrix(channels, HIDDEN),
        "attn_gate.weight": matrix(values, HIDDEN),
        "ssm_conv1d.weight": matrix(channels, KERNEL),
        "ssm_dt.bias": vector(DELTA_VALUES, -3),
        "ssm_a": -np.ones(DELTA_VALUES, np.float32),
        "ssm_ba.weight": matrix(2 * DELTA_VALUES, HIDDEN, 0.5),
        "ssm_norm.weight": vector(DELTA_SIZE),
        "ssm_out.weight": matrix(HIDDEN, values),
    }


def _experts(matrix: Callable[..., NDArray[np.float32]], vector: Callable[..., NDArray[np.float32]]) -> Tensors:
    def each(rows: int, columns: int) -> NDArray[np.float32]:
        return np.stack([matrix(rows, columns) for _ in range(EXPERTS)])

    return {
        "post_attention_norm.weight": vector(HIDDEN),
        "ffn_gate_inp.weight": matrix(EXPERTS, HIDDEN),
        "ffn_gate_exps.weight": each(INNER, HIDDEN),
        "ffn_up_exps.weight": each(INNER, HIDDEN),
        "ffn_down_exps.weight": each(HIDDEN, INNER),
        "ffn_gate_inp_shexp.weight": vector(HIDDEN, 0),
        "ffn_gate_shexp.weight": matrix(INNER, HIDDEN),
        "ffn_up_shexp.weight": matrix(INNER, HIDDEN),
        "ffn_down_shexp.weight": matrix(HIDDEN, INNER),
    }


def _recurrent(
    matrix: Callable[..., NDArray[np.float32]], vector: Callable[..., NDArray[np.float32]], norms: bool
) -> Tensors:
    """Steps are short, so that a state remembers tokens for long."""
    found = {
        "ssm_in.weight": matrix(2 * WIDTH, HIDDEN),
        "ssm_conv1d.weight": matrix(WIDTH, KERNEL),
        "ssm_conv1d.bias": vector(WIDTH, 0),
        "ssm_x.weight": matrix(STEP_RANK + 2 * DEPTH, WIDTH),
        "ssm_dt.weight": matrix(WIDTH, STEP_RANK, 0.5),
        "ssm_dt.bias": vector(WIDTH, -3),
        "ssm_a": -np.tile(np.arange(1, DEPTH + 1, dtype=np.float32), (WIDTH, 1)),
        "ssm_d": vector(WIDTH),
        "ssm_out.weight": matrix(HIDDEN, WIDTH),
    }
    if norms:
        found |= {
            "ssm_dt_norm.weight": vector(STEP_RANK),
            "ssm_b_norm.weight": vector(DEPTH),
            "ssm_c_norm.weight": vector(DEPTH),
        }
    return found
