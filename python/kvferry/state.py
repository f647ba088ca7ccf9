"""The recurrent state of a layer as vLLM keeps it: a conv state, followed by the recurrent state.

See kvferry/connector/state.h.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena
from kvferry._quantities import call, take
from kvferry._values import listed, of_type


class StateType(enum.IntEnum):
    """Which projections a conv state holds: x; x, B, C; Q, K, V."""

    MAMBA1 = lib.KVF_STATE_MAMBA1
    MAMBA2 = lib.KVF_STATE_MAMBA2
    GDN = lib.KVF_STATE_GDN


@dataclass(frozen=True)
class StateModel:
    """Sizes of a whole model's state; fields that the type does not use are 0. See kvf_state_model."""

    type: StateType
    intermediate_size: int = 0
    groups: int = 0
    heads: int = 0
    head_size: int = 0
    key_heads: int = 0
    key_head_size: int = 0
    state_size: int = 0
    conv_kernel: int = 0
    spec_steps: int = 0


@dataclass(frozen=True)
class StateShape:
    """The shapes of one rank's state tensors: conv is (channels, steps)."""

    conv: tuple[int, int]
    temporal: tuple[int, ...]


@dataclass(frozen=True)
class StateLayout:
    """The bytes of one rank's state, projection by projection."""

    projection_dims: tuple[int, ...]
    projection_bytes: tuple[int, ...]
    conv_steps: int
    conv_bytes: int
    ssm_bytes: int


@dataclass(frozen=True)
class ByteRun:
    """A run of bytes."""

    offset: int
    bytes: int


def state_shape_of(model: StateModel, tp_size: int) -> StateShape:
    """The shapes of the state on each rank of an engine of `tp_size` ranks.

    Raises NotExpressibleError (a size does not divide), InvalidError, OutOfRangeError.
    """
    found = take(
        lib.kvf_state_shape_of,
        "kvf_state_shape",
        Arena().new("kvf_state_model", **vars(of_type(StateModel, model))),
        tp_size,
    )
    return StateShape((found.conv[0], found.conv[1]), tuple(found.temporal)[: found.temporal_dimensions])


def conv_split(type: StateType, shape: StateShape, conv_elem_bytes: int, ssm_elem_bytes: int) -> StateLayout:
    """Finds the projections of a conv state from the shapes of the two tensors alone.

    Raises NotExpressibleError (the channels cannot be split), UnsupportedError, InvalidError.
    """
    temporal = listed(of_type(StateShape, shape).temporal, "numbers")
    struct = Arena().new(
        "kvf_state_shape", conv=shape.conv, temporal=temporal, temporal_dimensions=len(temporal)
    )
    found = take(lib.kvf_conv_split, "kvf_state_layout", type, struct, conv_elem_bytes, ssm_elem_bytes)
    count = found.projection_count
    return StateLayout(
        tuple(found.projection_dims)[:count],
        tuple(found.projection_bytes)[:count],
        found.conv_steps,
        found.conv_bytes,
        found.ssm_bytes,
    )


def layout_in(layout: StateLayout, arena: Arena) -> Any:
    """A kvf_state_layout *."""
    dims = listed(of_type(StateLayout, layout).projection_dims, "numbers")
    return arena.new(
        "kvf_state_layout",
        projection_count=len(dims),
        projection_dims=dims,
        projection_bytes=layout.projection_bytes,
        conv_steps=layout.conv_steps,
        conv_bytes=layout.conv_bytes,
        ssm_bytes=layout.ssm_bytes,
    )


def _runs(runs: Any, count: int) -> list[ByteRun]:
    return [ByteRun(runs[i].offset, runs[i].bytes) for i in range(count)]


def local_projection_runs(local: StateLayout) -> list[ByteRun]:
    """Where each projection lies in the local conv state."""
    arena = Arena()
    runs = ffi.new("kvf_byte_run[]", lib.KVF_MAX_PROJECTIONS)
    layout = layout_in(local, arena)
    lib.kvf_local_projection_runs(layout, runs)
    return _runs(runs, layout.projection_count)


def remote_projection_runs(local: StateLayout, tp_ratio: int, local_offset: int) -> list[ByteRun]:
    """The bytes of the remote conv state that fill the local projections: our share of each projection.

    Args:
        tp_ratio: see Topology.tp_ratio()
        local_offset: which share of a remote rank is ours: tp_rank modulo tp_ratio; not used below 0

    Raises NotExpressibleError, InvalidError, OutOfRangeError.
    """
    arena = Arena()
    runs = ffi.new("kvf_byte_run[]", lib.KVF_MAX_PROJECTIONS)
    layout = layout_in(local, arena)
    call(lib.kvf_remote_projection_runs, layout, tp_ratio, local_offset, runs)
    return _runs(runs, layout.projection_count)


def physical_blocks_per_logical(conv_bytes: int, ssm_bytes: int, block_bytes: int) -> int:
    """Kernel blocks that one state needs: its bytes divided by a block's, rounded up."""
    return int(take(lib.kvf_physical_blocks_per_logical, "uint64_t", conv_bytes, ssm_bytes, block_bytes))
