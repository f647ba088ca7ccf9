"""How many KV heads a layer of the whole model has.

vLLM describes the cache of one rank. If a layer has fewer heads than there are ranks, several ranks hold the
same head, and one rank's share does not say how many heads there are: one head on each of four ranks may be
one, two or four heads. So the number is read from vLLM's configuration, which has it layer by layer (Gemma 4
gives layers with a sliding window more heads than the others), and is checked against the rank's share.

Some models give single layers other numbers in fields that vLLM's configuration does not read. These numbers
are candidates too: the layer has the only candidate that agrees with the rank's share, and is refused if
several agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvferry.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

#: The fields that vLLM's configuration reads, for each layer if layers differ.
READ = {"n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"}
#: The fields in which vLLM's model classes find the numbers of single layers: fields with such names, anywhere,
#: and one that has the number of query heads for each KV head instead.
OTHERS = re.compile(r"(kv_heads|key_value_heads|kv_n_heads|attention_groups)$")
GROUP_SIZE = "n_heads_in_group"


def total_kv_heads(model: ModelConfig, name: str, layer: int, local: int, tp_size: int) -> int:
    """The KV heads of one layer in the whole model.

    Args:
        model: the configuration of the layer's model
        name: vLLM's name of the layer, for messages
        layer: its number in that model
        local: how many of its heads each rank holds

    Raises:
        UnsupportedError: the configuration contradicts what the rank holds, or leaves several numbers open
    """
    try:
        stated = model.model_arch_config[layer]
    except IndexError:
        raise UnsupportedError(f"layer {name} is not in vLLM's configuration of the model") from None
    candidates = {stated.total_num_kv_heads: "vLLM's configuration of the layer"}
    for field, heads in _other_numbers(
        model.hf_text_config.to_dict(), stated.total_num_attention_heads, inside=""
    ):
        candidates.setdefault(heads, field)
    fitting = [heads for heads in candidates if _held(heads, tp_size) == local]
    if len(fitting) == 1:
        return fitting[0]
    said = ", ".join(f"{heads} ({field})" for heads, field in candidates.items())
    found = "none of them gives that" if not fitting else "more than one of them gives that"
    raise UnsupportedError(
        f"layer {name} has {local} KV heads on each of {tp_size} ranks; the model has {said}: {found}"
    )


def _held(heads: int, tp_size: int) -> int | None:
    """How many of `heads` heads vLLM gives each rank; None if it would not divide them."""
    if heads < 1 or (heads % tp_size and tp_size % heads):
        return None
    return max(1, heads // tp_size)


def _other_numbers(value: Any, query_heads: int, inside: str) -> Iterator[tuple[str, int]]:
    """Places and values of a configuration's numbers of KV heads that vLLM's configuration does not read."""
    items = enumerate(value) if isinstance(value, list) else value.items()
    for field, item in items:
        where = f"{inside}.{field}" if inside else str(field)
        if isinstance(item, (dict, list)):
            if where != "per_layer_config":  # vLLM's configuration has read it
                yield from _other_numbers(item, query_heads, where)
        elif not isinstance(item, int) or item < 1 or where in READ:
            continue
        elif field == GROUP_SIZE:
            yield where, query_heads // item
        elif OTHERS.search(str(field)):
            yield where, item
