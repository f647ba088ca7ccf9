"""Where each cell of a cache is in vLLM's pages, on the CPU: an independent oracle.

It knows nothing of kvferry. It takes the pages that probing.py has read out of each rank, and the model's
configuration, and names every cell that a decode server needs by its logical coordinates: layer, part and head
(or channel of a convolution), with the bytes of all tokens. Two servers of any shapes have the same cache if
they have the same cells. It goes through the pages cell by cell, which is slow but simple.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Cell = tuple[str, str, int]  # layer, part, head or channel
Cells = dict[Cell, bytes]


class ReplicasDiffer(Exception):
    """Two ranks of one engine hold different bytes of one cell."""


def read_cells(folder: pathlib.Path, role: str, ranks: int, config: dict[str, Any], tokens: int) -> Cells:
    """The cells of one engine after `tokens` tokens, from the files that its ranks have written into a
    folder."""
    return join_cells([torch.load(folder / f"{role}.{rank}.pt") for rank in range(ranks)], config, tokens)


def join_cells(readouts: Sequence[dict[str, Any]], config: dict[str, Any], tokens: int) -> Cells:
    """The cells of all ranks of one engine after `tokens` tokens. Copies on several ranks must be equal."""
    found: Cells = {}
    for rank, readout in enumerate(readouts):
        for name, layer in readout["layers"].items():
            for part, unit, content in cells_of(layer, readout, config_of(config, name), tokens):
                if found.setdefault((name, part, unit), content) != content:
                    raise ReplicasDiffer(f"rank {rank}: {name} {part} {unit} differs from another rank's")
    return found


def config_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The configuration of one layer, by vLLM's name for it: in some models single layers have other heads, and
    a draft's layers have a configuration of their own."""
    (number,) = (word for word in name.split(".") if word.isdecimal())
    if is_draft(config, name):
        return dict(config["draft"])
    single: dict[str, Any] = config.get("per_layer_config", {}).get(number, {})
    if is_compressed(config):
        single = {"entry_parts": entry_parts(config, name)}
    return {**config, **single}


def is_compressed(config: dict[str, Any]) -> bool:
    """Whether it is DeepSeek V4, whose layers have several caches, some with an entry for several tokens."""
    return config["model_type"] == "deepseek_v4"


def entry_parts(config: dict[str, Any], name: str) -> dict[str, int]:
    """The parts of an entry of one of DeepSeek V4's caches, with their bytes. A page has one part of all its
    entries after the other."""
    size, rotary, index = (config[field] for field in ("head_dim", "qk_rope_head_dim", "index_head_dim"))
    if name.endswith(".state_cache"):  # of a compressor: what has yet to be compressed, in float32
        own = index if ".indexer." in name else size
        overlap = 2 if config["compress_ratios"][number_of(name)] == 4 else 1
        return {"state": 2 * overlap * own * 4}
    if name.endswith(".indexer.k_cache") and config.get("fp4_indexers"):
        return {"key": index // 2, "scale": index // 32}
    if name.endswith(".indexer.k_cache"):
        return {"key": index, "scale": 4}
    if config.get("plain_latents"):  # in bfloat16; otherwise but a few elements are of one byte
        return {"latent": 2 * size}
    return {"latent": size - rotary + 2 * rotary, "scale": 8}


def number_of(name: str) -> int:
    """The number of a layer."""
    (number,) = (int(word) for word in name.split(".") if word.isdecimal())
    return number


def cache_count(config: dict[str, Any]) -> int:
    """How many caches the layers of a model have."""
    if not is_compressed(config):
        return int(config["num_hidden_layers"])
    each = {0: 1, 128: 3, 4: 5}  # the window; entries and their state; an indexer with its own
    return sum(each[ratio] for ratio in config["compress_ratios"])


def is_empty(config: dict[str, Any], name: str, tokens: int) -> bool:
    """Whether so few tokens leave a cache without an entry."""
    if not is_compressed(config) or name.endswith((".swa_cache", ".state_cache")):
        return False
    return tokens < int(config["compress_ratios"][number_of(name)])


def is_draft(config: dict[str, Any], name: str) -> bool:
    """Whether a layer belongs to the model that proposes tokens, whose configuration is in `draft`."""
    numbers = [int(word) for word in name.split(".") if word.isdecimal()]
    return name.startswith("draft_model.") or numbers[0] >= config.get("num_hidden_layers", numbers[0] + 1)


def head_size(config: dict[str, Any]) -> int:
    """Elements of one head's key."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def expected_cells(config: dict[str, Any], layers: set[str], states: set[str]) -> set[Cell]:
    """The coordinates of a whole model, from its configuration alone."""
    wanted: set[Cell] = set()
    for name in layers:
        if name in states:
            parts = {f"conv {part}": count for part, count in projections(config)}
            if heads := recurrent_heads(config):
                parts["recurrent"] = heads
        elif is_compressed(config):
            parts = dict.fromkeys(entry_parts(config, name), 1)
        elif "kv_lora_rank" in config:
            parts = {"latent": 1}
        else:
            parts = dict.fromkeys(("k", "v"), config_of(config, name)["num_key_value_heads"])
        wanted |= {(name, part, unit) for part, count in parts.items() for unit in range(count)}
    return wanted


def cells_of(
    layer: dict[str, Any], rank: dict[str, Any], config: dict[str, Any], tokens: int
) -> Iterator[tuple[str, int, bytes]]:
    """Yields the part, the head or channel, and the bytes of every cell of a layer on a rank; `config` is the
    layer's."""
    if layer["states"] is not None:
        yield from state_cells(layer, rank, config)
        return
    # A query sees `window` tokens, including its own. The last token may be computed again, which needs one
    # more.
    first = max(0, tokens - layer["window"]) if layer["window"] else 0
    if "entry_parts" in config:
        yield from entry_cells(layer, config["entry_parts"], first, tokens)
        return
    places = [where(layer, token) for token in range(first, tokens)]
    if layer["is_latent"]:
        yield "latent", 0, b"".join(latent(layer, *place) for place in places)
        return
    held, total, tp = layer["shape"][0], config["num_key_value_heads"], rank["tp_size"]
    begin = rank["rank"] * total // tp
    assert held == max(1, total // tp), f"{held} heads of {total} on one of {tp} ranks"
    size = head_size(config)
    shape = (layer["head_size"], layer["shape"][-1])
    assert shape == (size, 2 * size), f"a key and a key with its value have {shape} elements; a head has {size}"
    for head in range(held):
        yield "k", begin + head, b"".join(key(layer, *place, head) for place in places)
        yield "v", begin + head, b"".join(value(layer, *place, head) for place in places)


def entry_cells(
    layer: dict[str, Any], parts: dict[str, int], first: int, tokens: int
) -> Iterator[tuple[str, int, bytes]]:
    """Yields the parts of the entries that the tokens from `first` on complete."""
    each, (_, page_entries, content) = layer["entry_tokens"], layer["shape"]
    assert sum(parts.values()) == content * layer["item_bytes"], f"{content} elements in an entry of {parts}"
    assert layer["block_tokens"] == page_entries * each, f"{page_entries} entries in a block"
    before = 0
    for part, size in parts.items():
        cells = []
        for entry in range(first // each, tokens // each):
            page = layer["pages"][layer["blocks"][entry // page_entries]].flatten()
            begin = before * page_entries + entry % page_entries * size
            cells.append(bytes_of(page[begin : begin + size]))
        yield part, 0, b"".join(cells)
        before += size


def where(layer: dict[str, Any], token: int) -> tuple[torch.Tensor, int]:
    """The page of a token, and the token's index in it."""
    block = layer["blocks"][token // layer["block_tokens"]]
    page_tokens = layer["shape"][1]
    page, at = divmod(token % layer["block_tokens"], page_tokens)
    return layer["pages"][block][page].view(-1, layer["item_bytes"]), at


# A page of attention on the CPU: head after head; for each head the keys of all tokens, [channel, token], and
# then the values of all tokens, [token, channel].


def key(layer: dict[str, Any], page: torch.Tensor, at: int, head: int) -> bytes:
    """The key of one token, whose elements are apart."""
    _, tokens, content = layer["shape"]
    size = layer["head_size"]
    begin = head * tokens * content
    return bytes_of(page[begin + torch.arange(size) * tokens + at])


def value(layer: dict[str, Any], page: torch.Tensor, at: int, head: int) -> bytes:
    """The value of one token."""
    _, tokens, content = layer["shape"]
    size = layer["head_size"]
    begin = head * tokens * content + size * tokens + at * (content - size)
    return bytes_of(page[begin : begin + content - size])


def latent(layer: dict[str, Any], page: torch.Tensor, at: int) -> bytes:
    """The latent of one token; a page has latents one after the other."""
    content = layer["shape"][-1]
    return bytes_of(page[at * content : (at + 1) * content])


# A state: a convolution's last inputs and then the recurrent state. The convolution's channels are those of
# several projections; tensor parallelism either splits a projection by heads or copies it to all ranks.


def projections(config: dict[str, Any]) -> list[tuple[str, int]]:
    """Name and channels of each projection in the convolution, in the order of its channels."""
    if config["model_type"] == "qwen3_next":
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return [
            ("q", keys),
            ("k", keys),
            ("v", config["linear_num_value_heads"] * config["linear_value_head_dim"]),
        ]
    if config["model_type"] == "kimi_linear":
        linear = config["linear_attn_config"]
        return [(name, linear["num_heads"] * linear["head_dim"]) for name in "qkv"]
    if config["model_type"] == "lfm2":
        return [("x", config["conv_dim"])]
    inner = config["mamba_n_heads"] * config["mamba_d_head"]
    groups = config["mamba_n_groups"] * config["mamba_d_state"]
    return [("x", inner), ("B", groups), ("C", groups)]


def recurrent_heads(config: dict[str, Any]) -> int:
    """The number of heads of the recurrent state; 0 if there is none."""
    if config["model_type"] == "lfm2":
        return 0
    if config["model_type"] == "kimi_linear":
        return int(config["linear_attn_config"]["num_heads"])
    gated = config["model_type"] == "qwen3_next"
    return int(config["linear_num_value_heads"] if gated else config["mamba_n_heads"])


def conv_steps(config: dict[str, Any]) -> int:
    """The number of inputs of each channel that a convolution keeps."""
    kernel = config.get("linear_conv_kernel_dim") or config.get("mamba_d_conv") or config.get("conv_L_cache")
    return int(kernel or config["linear_attn_config"]["short_conv_kernel_size"]) - 1


def is_copied(config: dict[str, Any], part: str, tp: int) -> bool:
    """Whether every rank holds a whole projection: B and C of Mamba 2, if there are fewer groups than ranks."""
    return part in ("B", "C") and config["mamba_n_groups"] % tp != 0


def channels_first(layer: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a convolution's state is [channel, step]; else it is [step, channel]."""
    return bool(layer["states"][0][0][0] != conv_steps(config))


def state_cells(
    layer: dict[str, Any], rank: dict[str, Any], config: dict[str, Any]
) -> Iterator[tuple[str, int, bytes]]:
    """Yields the parts of a state: the last inputs of each channel, and any recurrent state of each head."""
    (conv_shape, conv_item), *recurrent = layer["states"]
    page = layer["pages"][layer["blocks"][-1]].flatten()
    conv_bytes = conv_shape[0] * conv_shape[1] * conv_item
    conv = page[:conv_bytes].view(*conv_shape, conv_item)
    if not channels_first(layer, config):
        conv = conv.transpose(0, 1)
    first = 0
    for part, channels in projections(config):
        copied = is_copied(config, part, rank["tp_size"])
        held = channels if copied else channels // rank["tp_size"]
        begin = 0 if copied else rank["rank"] * held
        for channel in range(held):
            yield f"conv {part}", begin + channel, bytes_of(conv[first + channel])
        first += held
    assert first == conv.shape[0], f"{first} channels in a convolution of {conv.shape[0]}"
    for heads_shape, heads_item in recurrent:
        head_bytes = heads_item * heads_shape[1] * heads_shape[2]
        for head in range(heads_shape[0]):
            begin = conv_bytes + head * head_bytes
            yield "recurrent", rank["rank"] * heads_shape[0] + head, bytes_of(page[begin : begin + head_bytes])


def converted_cells(cells: Cells, dtype: str, to: str) -> Cells:
    """The same elements in another type, rounded by torch: to nearest, ties to even."""

    def converted(content: bytes) -> bytes:
        elements = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype))
        return bytes_of(elements.to(getattr(torch, to)).view(torch.uint8))

    return {cell: converted(content) for cell, content in cells.items()}


def bytes_of(cells: torch.Tensor) -> bytes:
    """The bytes of cells, in their order."""
    return bytes(cells.contiguous().flatten().numpy())
