"""The layout of state layers (Mamba, gated delta nets): conv state and recurrent state in one page.

vLLM's description of the cache does not say what a conv state's channels are (x, B and C, or queries, keys and
values, each split by tensor parallelism separately); kvferry knows it from the model's configuration.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from kvferry.errors import UnsupportedError
from kvferry.model import Dtype, GroupKind, Model, Part, TpRule
from kvferry.shard import PartShare, Placement
from kvferry.vllm.compat import MambaSpec, is_conv_state_dim_first

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def configured_model(model: ModelConfig) -> Model:
    """The model as its config.json describes it."""
    return Model.from_config(model.hf_text_config.to_json_string(use_diff=False))


def state_parts(model: Model, layer: int, tensors: int) -> tuple[Part, ...]:
    """The parts of a layer's state of so many tensors; a layer may have more than one state (Qwen 4)."""
    found = [group.parts for group in model.groups if group.kind == GroupKind.STATE and layer in group.layers]
    if not found:
        raise UnsupportedError(
            f"layer {layer} keeps a state, but the model's configuration does not describe it"
        )
    fitting = [parts for parts in found if len({part.tensor for part in parts}) == tensors]
    if len(fitting) != 1:
        counts = ", ".join(str(len({part.tensor for part in parts})) for parts in found)
        raise UnsupportedError(f"layer {layer} keeps a state of {tensors} tensors; the model has {counts}")
    return fitting[0]


def share_of(part: Part, tp_rank: int, tp_size: int) -> PartShare:
    """What a rank holds of a part: granules that tensor parallelism never separates."""
    if part.tp_rule == TpRule.REPLICATE:
        return PartShare(range(part.units), tp_rank, tp_size)
    each = part.granule_units or 1
    granules = part.units // each
    if tp_size <= granules:
        first, end = tp_rank * granules // tp_size, (tp_rank + 1) * granules // tp_size
        return PartShare(range(first * each, end * each))
    if tp_size % granules:
        raise UnsupportedError(f"part {part.name}: {granules} granules over {tp_size} ranks")
    copies = tp_size // granules
    first = tp_rank // copies
    return PartShare(range(first * each, (first + 1) * each), tp_rank % copies, copies)


def place_state(
    spec: MambaSpec,
    parts: tuple[Part, ...],
    rank: tuple[int, int],
    region: int,
    offset: int,
    block_stride: int,
) -> tuple[tuple[Part, ...], tuple[PartShare, ...], tuple[Placement, ...]]:
    """Parts, shares and placements of one layer, whose state of block 0 is at `offset`.

    Args:
        rank: (tensor-parallel rank, how many there are)
    """
    tensors = sorted({part.tensor for part in parts})
    found: dict[str, tuple[Part, PartShare, Placement]] = {}
    at = offset
    for tensor, shape, dtype in zip(tensors, spec.shapes, spec.dtypes, strict=True):
        mine = [
            dataclasses.replace(part, dtype=Dtype.by_name(str(dtype)))
            for part in parts
            if part.tensor == tensor
        ]
        item = torch.empty(0, dtype=dtype).element_size()
        shares = [share_of(part, *rank) for part in mine]
        held = sum(len(share.units) for share in shares)
        rows, cell = mine[0].rows_per_step, mine[0].cell_elements
        if math.prod(shape) != held * rows * cell:
            raise UnsupportedError(
                f"state tensor {tensor} has shape {tuple(shape)}; the model has {held} units of {rows} rows"
            )
        # A conv state is (channel, step) or (step, channel); a recurrent state has one row.
        channels_first = rows == 1 or is_conv_state_dim_first()
        unit, row = (rows * cell * item, cell * item) if channels_first else (cell * item, held * cell * item)
        first = at
        for part, share in zip(mine, shares, strict=True):
            found[part.name] = (part, share, Placement(region, first, block_stride, row, unit))
            first += len(share.units) * unit
        at += math.prod(shape) * item
    ordered = [found[part.name] for part in parts]
    return (
        tuple(part for part, _, _ in ordered),
        tuple(share for _, share, _ in ordered),
        tuple(place for _, _, place in ordered),
    )
