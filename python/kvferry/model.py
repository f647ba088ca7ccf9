"""What is cached: groups of layers, and the parts each layer keeps. See kvferry/model.h."""

from __future__ import annotations

import enum
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Handle, Resource, bytes_of, call, resource_of, result_of, string, take
from kvferry._values import encoded, list_of, listed, of_type, whole_number, wrong_type
from kvferry.errors import ConfigWarning, InvalidError


class Dtype(enum.IntEnum):
    """How an element is stored."""

    F64 = lib.KVF_DTYPE_F64
    F32 = lib.KVF_DTYPE_F32
    F16 = lib.KVF_DTYPE_F16
    BF16 = lib.KVF_DTYPE_BF16
    F8_E4M3 = lib.KVF_DTYPE_F8_E4M3
    F8_E5M2 = lib.KVF_DTYPE_F8_E5M2
    I8 = lib.KVF_DTYPE_I8
    U8 = lib.KVF_DTYPE_U8
    F4_E2M1 = lib.KVF_DTYPE_F4_E2M1
    I4 = lib.KVF_DTYPE_I4

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return int(lib.kvf_dtype_bits(self))

    @classmethod
    def by_name(cls, name: str) -> Dtype:
        """Finds a dtype by kvferry's name or one that configurations use, such as "torch.bfloat16".

        Raises NotFoundError for an unknown name.
        """
        return cls(take(lib.kvf_dtype_by_name, "kvf_dtype", Arena().text(name)))


#: The types that the library converts into each other.
CONVERTED = (Dtype.F32, Dtype.F16, Dtype.BF16, Dtype.F8_E4M3, Dtype.F8_E5M2)


DtypeLike = Dtype | str


def dtype_set(values: Iterable[DtypeLike]) -> int:
    """A set of dtypes, as the library takes it."""
    bits = 0
    for value in listed(values, "element types"):
        bits |= 1 << to_dtype(value)
    return bits


def to_dtype(value: DtypeLike) -> Dtype:
    """A dtype from itself or one of its names."""
    return value if isinstance(value, Dtype) else Dtype.by_name(value)


class GroupKind(enum.IntEnum):
    """What one entry of a group's block table holds."""

    TOKENS = lib.KVF_GROUP_TOKENS
    STATE = lib.KVF_GROUP_STATE


class Agreement(enum.IntEnum):
    """How two models' groups of the same name compare.

    SAME: what both have of it are the same elements of the same types. CONVERT: the same elements of other
    types, which both sides allow to be converted. DIFFER: other elements. MISSING: only one side has the group.
    """

    SAME = lib.KVF_AGREE_SAME
    CONVERT = lib.KVF_AGREE_CONVERT
    DIFFER = lib.KVF_AGREE_DIFFER
    MISSING = lib.KVF_AGREE_MISSING


@dataclass(frozen=True)
class GroupMatch:
    """What two models have in common of one group, seen from one of them.

    Attributes:
        ours, theirs: its number in either model; None: that model lacks it
        layers_both: how many layers both have in the group; layers_ours, layers_theirs: layers of one side only
        detail: what differs or is missing, with both values
    """

    name: str
    ours: int | None
    theirs: int | None
    agreement: Agreement
    layers_both: int
    layers_ours: int
    layers_theirs: int
    detail: str


class TpRule(enum.IntEnum):
    """How a part's units spread over tensor-parallel ranks."""

    SPLIT = lib.KVF_TP_SPLIT
    REPLICATE = lib.KVF_TP_REPLICATE


@dataclass(frozen=True)
class Part:
    """One part of a layer's cache: K, V, a latent, a projection of a conv state, a recurrent state ...

    Attributes:
        name: unique in its group
        dtype: of one element
        units: KV heads, channels ... of the whole model, over all ranks
        cell_elements: elements of one cell, such as the head size
        granule_units: units that tensor parallelism never separates; divides `units`
        rows_per_step: rows for each token or state
        tensor: parts of the same number share a buffer
        tp_rule: whether ranks split the units, or each keeps all
    """

    name: str
    dtype: DtypeLike
    units: int
    cell_elements: int
    granule_units: int = 1
    rows_per_step: int = 1
    tensor: int = 0
    tp_rule: TpRule = TpRule.SPLIT

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell."""
        arena = Arena()
        return int(lib.kvf_part_cell_bytes(arena.array("kvf_part_desc", [_part_fields(self, arena)])))


@dataclass(frozen=True)
class Group:
    """A set of layers that share one block table.

    Attributes:
        name: unique in the model
        layers: model layer indices, ascending
        parts: what each of these layers keeps
        kind: whether a block holds tokens or one whole state
        window_tokens: sliding window: tokens a query can see, with itself; 0: all
        chunk_tokens: chunked attention: tokens before the current chunk are never read; 0: all
        tokens_per_step: neighbouring tokens that share one entry of the cache, which is there once the last
            of them is computed
    """

    name: str
    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    kind: GroupKind = GroupKind.TOKENS
    window_tokens: int = 0
    chunk_tokens: int = 0
    tokens_per_step: int = 1

    @property
    def step_bytes(self) -> int:
        """Cache bytes of one token, compressed entry or state, of one layer, over the whole model."""
        arena = Arena()
        return int(lib.kvf_group_step_bytes(arena.array("kvf_group_desc", [_group_fields(self, arena)])))

    def step_count(self, tokens: int) -> int:
        """How many steps the first `tokens` tokens of a sequence make: as many, or as many whole entries where
        several tokens share one; always 1 for states. Requests count steps.
        """
        arena = Arena()
        group = arena.array("kvf_group_desc", [_group_fields(self, arena)])
        return int(result_of(lib.kvf_group_step_count, group, tokens))

    def first_needed(self, end: int) -> int:
        """The first of `end` cached tokens that a later query of this group can still read."""
        arena = Arena()
        group = arena.array("kvf_group_desc", [_group_fields(self, arena)])
        return int(result_of(lib.kvf_group_first_needed, group, end))


def _part_fields(given: Part, arena: Arena) -> dict[str, Any]:
    part = of_type(Part, given)
    return {
        "name": arena.text(part.name),
        "dtype": to_dtype(part.dtype),
        "units": part.units,
        "granule_units": part.granule_units,
        "cell_elements": part.cell_elements,
        "rows_per_step": part.rows_per_step,
        "tensor": part.tensor,
        "tp_rule": part.tp_rule,
    }


def _group_fields(given: Group, arena: Arena) -> dict[str, Any]:
    group = of_type(Group, given)
    layers, parts = listed(group.layers, "numbers"), listed(group.parts, Part.__name__)
    return {
        "name": arena.text(group.name),
        "kind": group.kind,
        "window_tokens": group.window_tokens,
        "chunk_tokens": group.chunk_tokens,
        "tokens_per_step": group.tokens_per_step,
        "layers": arena.numbers("uint32_t", layers, "a layer"),
        "layer_count": len(layers),
        "parts": arena.array("kvf_part_desc", [_part_fields(part, arena) for part in parts]),
        "part_count": len(parts),
    }


def _read_group(desc: Any) -> Group:
    parts = []
    for i in range(desc.part_count):
        part = desc.parts[i]
        parts.append(
            Part(
                name=string(part.name),
                dtype=Dtype(part.dtype),
                units=part.units,
                cell_elements=part.cell_elements,
                granule_units=part.granule_units,
                rows_per_step=part.rows_per_step,
                tensor=part.tensor,
                tp_rule=TpRule(part.tp_rule),
            )
        )
    return Group(
        name=string(desc.name),
        layers=tuple(ffi.unpack(desc.layers, desc.layer_count)) if desc.layer_count else (),
        parts=tuple(parts),
        kind=GroupKind(desc.kind),
        window_tokens=desc.window_tokens,
        chunk_tokens=desc.chunk_tokens,
        tokens_per_step=desc.tokens_per_step,
    )


class Model(Handle):
    """What one model caches. Immutable: any thread may read it.

    Args:
        groups: its groups of layers
        layer_count: layers of the model, cached or not; None: up to the last that is cached
        name: for messages

    Raises InvalidError, OutOfRangeError or SizeOverflowError; the detail names group, part and field.
    """

    def __init__(self, groups: Sequence[Group], layer_count: int | None = None, name: str = "model") -> None:
        arena = Arena()
        groups = list_of(Group, groups)
        items = [_group_fields(group, arena) for group in groups]
        if layer_count is None:
            layer_count = max(
                (whole_number(layer, "a layer") + 1 for group in groups for layer in group.layers), default=0
            )
        desc = arena.new(
            "kvf_model_desc",
            name=arena.text(name),
            layer_count=layer_count,
            groups=arena.array("kvf_group_desc", items),
            group_count=len(groups),
        )
        self._own(take(lib.kvf_model_create, "kvf_model *", desc), lib.kvf_model_free)

    @classmethod
    def _adopt(cls, pointer: Any, *parents: Resource) -> Model:
        model = cls.__new__(cls)
        model._own(pointer, lib.kvf_model_free, *parents)
        return model

    @classmethod
    def _of(cls, pointer: Any) -> Model:
        """One more owner of a model that another object of the library owns."""
        return cls._adopt(lib.kvf_model_retain(pointer))

    @classmethod
    def from_config(
        cls,
        config: str | bytes | Mapping[str, Any],
        *,
        name: str | None = None,
        cache_dtype: DtypeLike | None = None,
        state_dtype: DtypeLike | None = None,
        scale_dtype: DtypeLike | None = None,
        scale_per_head: bool = False,
    ) -> Model:
        """Makes a model from a Hugging Face `config.json`: its text, or its content as a mapping.

        Args:
            name: for messages; None: the configuration's model_type
            cache_dtype: of the attention cache; None: as the configuration says
            state_dtype: of recurrent state, and of that of compressors; None: as the configuration says
            scale_dtype: of quantisation scales beside K and V; None: there are none
            scale_per_head: one scale per token and head; otherwise one per token

        Raises ParseError (not JSON), UnsupportedError (a family that is not known), InvalidError,
        OutOfRangeError; the detail names the field. Warns with ConfigWarning of fields that may decide a size
        and were not read, see `notes`.
        """
        arena = Arena()
        text, size = arena.data(_config_text(config))
        options = _config_options(arena, name, cache_dtype, state_dtype, scale_dtype, scale_per_head)
        return cls._read(take(lib.kvf_model_from_config, "kvf_model *", text, size, options))

    @classmethod
    def load(
        cls,
        path_or_name: str | os.PathLike[str],
        *,
        name: str | None = None,
        cache_dtype: DtypeLike | None = None,
        state_dtype: DtypeLike | None = None,
        scale_dtype: DtypeLike | None = None,
        scale_per_head: bool = False,
    ) -> Model:
        """The same from a file, or from a model that comes with the library: see builtin_models()."""
        arena = Arena()
        options = _config_options(arena, name, cache_dtype, state_dtype, scale_dtype, scale_per_head)
        path = arena.text(_path(path_or_name))
        return cls._read(take(lib.kvf_model_load, "kvf_model *", path, options))

    @classmethod
    def _read(cls, pointer: Any) -> Model:
        """Adopts a model made from a configuration; warns the caller's caller of fields that were not read."""
        model = cls._adopt(pointer)
        for note in model.notes:
            warnings.warn(f"{model.name}: {note}", ConfigWarning, stacklevel=3)
        return model

    @property
    def name(self) -> str:
        """The name in messages."""
        resource = self._get()
        return string(lib.kvf_model_name(resource.pointer))

    @property
    def notes(self) -> tuple[str, ...]:
        """Fields of the configuration that may decide a size and were not read, a sentence for each."""
        resource = self._get()
        notes: list[str] = []
        while (note := lib.kvf_model_note(resource.pointer, len(notes))) != ffi.NULL:
            notes.append(string(note))
        return tuple(notes)

    @property
    def layer_count(self) -> int:
        """Layers of the model, cached or not."""
        resource = self._get()
        return int(lib.kvf_model_layer_count(resource.pointer))

    @property
    def groups(self) -> tuple[Group, ...]:
        """Its groups, with their defaults filled in."""
        resource = self._get()
        count = lib.kvf_model_group_count(resource.pointer)
        return tuple(_read_group(lib.kvf_model_group(resource.pointer, i)) for i in range(count))

    def compare(self, other: Model) -> None:
        """Raises MismatchError, naming the first field that differs, if the two cache different cells."""
        mine, theirs = self._get(), resource_of(Model, other)
        call(lib.kvf_model_compare, mine.pointer, theirs.pointer)

    def __repr__(self) -> str:
        if self.closed:
            return "<Model, closed>"
        return f"<Model {self.name}: {', '.join(group.name for group in self.groups)}>"


def _config_text(config: str | bytes | Mapping[str, Any]) -> bytes:
    if isinstance(config, Mapping):
        try:
            config = json.dumps(config)
        except (TypeError, ValueError) as error:
            raise InvalidError(f"the configuration cannot be written as JSON: {error}") from None
    return encoded(config) if isinstance(config, str) else bytes_of(config, "text, bytes, and a mapping")


def _path(path: str | os.PathLike[str]) -> str:
    try:
        return os.fspath(path)
    except TypeError:
        raise wrong_type(path, "a path, or the name of a model") from None


def _config_options(
    arena: Arena,
    name: str | None,
    cache: DtypeLike | None,
    state: DtypeLike | None,
    scale: DtypeLike | None,
    scale_per_head: bool,
) -> Any:
    if scale_per_head and scale is None:
        raise InvalidError("scale_per_head is True, but scale_dtype is None")
    return arena.new(
        "kvf_config_options",
        name=arena.text(name),
        cache_dtype=to_dtype(cache) if cache is not None else 0,
        state_dtype=to_dtype(state) if state is not None else 0,
        scale_dtype=to_dtype(scale) if scale is not None else 0,
        scale_per_head=scale_per_head,
    )


def config_families() -> list[tuple[str, ...]]:
    """The families whose configurations Model.load() reads, each as the values of `model_type` that name it.

    The types of one family are cached alike. A model of no family is described by hand: Model(...).
    """
    families: list[tuple[str, ...]] = []
    while (types := lib.kvf_config_family(len(families))) != ffi.NULL:
        families.append(tuple(string(types).split()))
    return families


def builtin_models() -> list[str]:
    """The names of the models that come with the library, for Model.load()."""
    names: list[str] = []
    while (name := lib.kvf_builtin_model_name(len(names))) != ffi.NULL:
        names.append(string(name))
    return names
