"""Models, shards, engines, plans and requests."""

from __future__ import annotations

import dataclasses
import gc
import json
from typing import Any

import numpy as np
import pytest

import kvferry
from coordinates import HEADS, PREFILL_TABLE, decode_engine, prefill_engine, small_model
from kvferry import (
    NO_BLOCK,
    BlockTable,
    ClosedError,
    Dtype,
    Engine,
    Group,
    GroupRequest,
    GroupShard,
    GroupSpec,
    InvalidError,
    MismatchError,
    Model,
    NotFoundError,
    OutOfRangeError,
    OverlapError,
    ParseError,
    Part,
    PartShare,
    Placement,
    Plan,
    Request,
    Shard,
    TpRule,
    UncoveredError,
    UnsupportedError,
    builtin_models,
    config_families,
)
from kvferry._binding import ffi
from kvferry._native import Arena

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


def test_a_model_says_what_it_was_made_of() -> None:
    model = small_model()
    group = model.groups[0]
    assert (model.name, model.layer_count, group.name, group.layers) == ("small", 2, "full", (0, 1))
    assert group.parts[0] == Part("k", Dtype.F32, 4, 8)
    assert group.parts[0].cell_bytes == 32
    assert group.step_bytes == 2 * 4 * 32


def test_a_model_is_read_from_a_configuration_as_mapping_text_or_name() -> None:
    assert Model.from_config(LLAMA).groups == Model.from_config(json.dumps(LLAMA)).groups
    fp8 = Model.from_config(LLAMA, cache_dtype="fp8", name="mine")
    assert (fp8.name, fp8.groups[0].parts[0].dtype) == ("mine", Dtype.F8_E4M3)
    assert "llama-3.1-8b" in builtin_models()
    assert Model.load("llama-3.1-8b").layer_count == 32


def test_a_windowed_group_says_what_it_still_needs() -> None:
    group = Group("swa", (0,), (Part("k", "bf16", 1, 8),), window_tokens=16)
    assert group.first_needed(100) == 84


def test_a_group_of_entries_says_how_many_some_tokens_make() -> None:
    parts = (Part("latent", "bf16", 1, 8, tp_rule=TpRule.REPLICATE),)
    model = Model([Group("csa", (0,), parts, tokens_per_step=4), Group("swa", (0,), parts)])
    csa, swa = model.groups
    assert (csa.tokens_per_step, swa.tokens_per_step) == (4, 1)
    assert [csa.step_count(tokens) for tokens in (0, 3, 4, 1003)] == [0, 0, 1, 250]
    assert swa.step_count(1003) == 1003
    engine = Engine(model, groups=[GroupSpec(9, 64), GroupSpec(9, 16)])
    assert [group.tokens_per_block for group in engine.shards[0].groups] == [64, 16]
    assert engine.shards[0].locate(0, 0, 0, 2, 15, 0).offset == (2 * 16 + 15) * 16
    with pytest.raises(InvalidError, match=r"group csa: tokens_per_block is 18; .* 4"):
        Engine(model, groups=[GroupSpec(9, 18), GroupSpec(9, 16)])


def test_a_block_has_whole_entries_where_nobody_says_how_many_tokens() -> None:
    parts = (Part("latent", "bf16", 1, 8, tp_rule=TpRule.REPLICATE),)
    groups = [Group(f"of {each}", (0,), parts, tokens_per_step=each) for each in (1, 3, 4, 128)]
    shard = Engine(Model(groups), GroupSpec(9)).shard(0)
    assert [group.tokens_per_block for group in shard.groups] == [16, 18, 16, 128]


def test_a_field_that_may_decide_a_size_and_is_not_read_is_warned_of() -> None:
    words = "llama: new_head_dim is 8: it may decide a size, but is not read for llama"
    with pytest.warns(kvferry.ConfigWarning, match=words) as caught:
        model = Model.from_config({**LLAMA, "new_head_dim": 8})
    assert caught[0].filename == __file__
    assert [f"llama: {note}" for note in model.notes] == [words]
    assert Model.from_config(LLAMA).notes == ()


@pytest.mark.parametrize(
    ("config", "error"),
    [("{", ParseError), ({"model_type": "nobody"}, UnsupportedError), ({}, kvferry.KvferryError)],
)
def test_a_bad_configuration_is_refused(config: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        Model.from_config(config)  # type: ignore[arg-type]


def test_the_families_that_are_listed_are_read_and_others_are_not() -> None:
    types = [model_type for family in config_families() for model_type in family]
    assert {"llama", "deepseek_v3", "mamba2"} <= set(types) and len(set(types)) == len(types)

    def refusal(model_type: str) -> str:
        with pytest.raises(kvferry.KvferryError) as refused:
            Model.from_config({"model_type": model_type})
        return str(refused.value)

    assert "an unknown family" in refusal("nobody")
    for model_type in types:  # their sizes are missing, but the family is known
        assert "an unknown family" not in refusal(model_type), model_type


def test_dtypes_are_known_by_many_names() -> None:
    assert Dtype.by_name("torch.float16") is Dtype.F16
    assert Dtype.BF16.bits == 16
    with pytest.raises(NotFoundError):
        Dtype.by_name("float17")


def test_models_that_differ_are_told_apart_with_the_field() -> None:
    small_model().compare(small_model())
    with pytest.raises(MismatchError, match="cell_elements"):
        small_model().compare(small_model(head_size=16))


def test_a_shard_says_what_a_rank_holds_and_where() -> None:
    shard = prefill_engine(small_model()).shard(1)
    group = shard.groups[0]
    assert (shard.rank, shard.tp_rank, shard.layers) == (1, 1, range(2))
    assert group.parts[0].units == range(2, 4)
    assert group.tokens_per_block == 16
    assert group.placements[1][0] == shard.placement(0, 1, 0)
    location = shard.locate(0, 1, 0, block=3, row=5, unit=2)
    place = shard.placement(0, 1, 0)
    assert location.offset == place.offset + 3 * place.block_stride + 5 * place.row_stride
    assert location.bytes == 32
    with pytest.raises(OutOfRangeError):
        shard.locate(0, 1, 0, block=3, row=5, unit=0)
    with pytest.raises(NotFoundError):
        shard.placement(0, 2, 0)


def explicit_shard(model: Model, rank: int, units: range, block_stride: int = 2048) -> Shard:
    """4 blocks of 16 tokens; K, then V, of two heads each."""
    placement = [Placement(0, part * 1024, block_stride, 64, 32) for part in range(2)]
    rows = tuple(
        tuple(Placement(layer, p.offset, p.block_stride, p.row_stride, p.unit_stride) for p in placement)
        for layer in range(2)
    )
    group = GroupShard(16, 4, (PartShare(units), PartShare(units)), rows)
    return Shard(model, rank=rank, layers=(0, 2), region_bytes=[8192, 8192], groups=[group])


def test_cells_may_be_kept_in_pieces() -> None:
    model = small_model()
    elements = model.groups[0].parts[0].cell_elements
    half = 16 * 4 * elements  # the keys of 16 tokens of a head, channel by channel; their values follow
    page = HEADS * 2 * half
    key = Placement(0, 0, page, 4, 2 * half, 16 * 4, elements)
    value = Placement(0, half, page, 4 * elements, 2 * half)
    share = PartShare(range(HEADS))
    group = GroupShard(16, 4, (share, share), ((key, value), (key, value)))
    with pytest.raises(OverlapError):
        Shard(model, rank=0, layers=(0, 2), region_bytes=[4 * page], groups=[group])
    rows = tuple(
        tuple(dataclasses.replace(place, region=layer) for place in (key, value)) for layer in range(2)
    )
    group = dataclasses.replace(group, placements=rows)
    shard = Shard(model, rank=0, layers=(0, 2), region_bytes=[4 * page, 4 * page], groups=[group])
    assert shard.placement(0, 1, 0) == rows[1][0]
    location = shard.locate(0, 1, 0, block=1, row=3, unit=2)
    assert (location.pieces, location.piece_stride, location.bytes) == (elements, 64, 4 * elements)
    engine = Engine.from_shards(model, [shard], "theirs")
    Plan(decode_engine(model).shard(0), engine).verify()


def test_a_plan_needs_only_the_groups_that_it_is_for() -> None:
    group = small_model().groups[0]
    both = Model([group, dataclasses.replace(group, name="draft", layers=(2,))], 3)
    local = Engine(both, GroupSpec(4)).shard(0)
    remote = Engine(small_model(), GroupSpec(4))
    with pytest.raises(MismatchError, match="draft is missing remotely"):
        Plan(local, remote)
    plan = Plan(local, remote, groups=[0])
    plan.verify()
    assert {cut.group for cut in plan.cuts} == {0}


def test_an_engine_is_made_of_shards_that_something_else_laid_out() -> None:
    model = small_model()
    shards = [explicit_shard(model, 0, range(2)), explicit_shard(model, 1, range(2, 4))]
    engine = Engine.from_shards(model, shards, "theirs")
    assert all(shard.closed for shard in shards)
    plan = Plan(decode_engine(model).shard(0), engine)
    plan.verify()
    assert plan.sources == [0, 1]
    with pytest.raises(InvalidError, match="another engine"):
        Engine.from_shards(model, [engine.shard(0)])


def test_cells_that_overlap_are_refused() -> None:
    with pytest.raises(OverlapError):
        explicit_shard(small_model(), 0, range(2), block_stride=1024)


def test_a_plan_names_sources_cuts_rules_and_costs() -> None:
    model = small_model()
    plan = Plan(decode_engine(model).shard(0), prefill_engine(model))
    plan.verify()
    assert plan.sources == [0, 1]
    assert {(cut.source, cut.units) for cut in plan.cuts} == {(0, range(2)), (1, range(2, 4))}
    assert sum(len(plan.source_rules(s)) for s in range(2)) == len(plan.rules)
    assert plan.predict(0, 40).bytes == 40 * 2 * 2 * 2 * 32
    assert plan.memory_bytes > 0


def test_a_request_that_nobody_holds_is_an_error() -> None:
    model = small_model()
    half = Engine.from_shards(model, [explicit_shard(model, 0, range(2))])
    with pytest.raises(UncoveredError, match="units"):
        Plan(decode_engine(model).shard(0), half)


def test_a_request_gives_its_runs_as_an_array() -> None:
    model = small_model()
    plan = Plan(decode_engine(model).shard(0), prefill_engine(model))
    request = Request(plan, [GroupRequest([5, 1], PREFILL_TABLE, 0, 40)])
    runs = request.runs(0)
    assert runs["bytes"].sum() == request.bytes(0) == 40 * 2 * 2 * (HEADS // 2) * 32
    assert len(runs) == request.run_count(0)
    assert request.steps(0) == range(40)
    assert len(request.runs(7)) == 0


def test_a_prefix_hit_is_a_table_that_ends_with_the_sequence() -> None:
    model = small_model()
    plan = Plan(decode_engine(model).shard(0), prefill_engine(model))
    tail = BlockTable.tail([1], tokens=40, tokens_per_block=24)
    assert tail.first_block == 1
    request = Request(plan, [GroupRequest(tail, PREFILL_TABLE, 24, 40)])
    assert request.bytes(0) == 16 * 2 * 2 * 2 * 32
    with pytest.raises(OutOfRangeError):
        BlockTable.tail([1, 2, 3], tokens=40, tokens_per_block=24)


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ([5, 8], "block 8"),
        ([5], "local"),
        ([5, NO_BLOCK], "local"),
        ([5, -1], "id -1"),
        ([5, 2**32], "id 4294"),
    ],
)
def test_a_bad_block_table_is_refused_and_changes_nothing(local: list[int], message: str) -> None:
    model = small_model()
    plan = Plan(decode_engine(model).shard(0), prefill_engine(model))
    request = Request(plan, [GroupRequest([5, 1], PREFILL_TABLE, 0, 40)])
    before = request.runs(0)
    with pytest.raises(OutOfRangeError, match=message) as raised:
        request.set([GroupRequest(local, PREFILL_TABLE, 0, 40)])
    assert raised.value.status == kvferry.Status.RANGE
    assert np.array_equal(request.runs(0), before)


def test_block_ids_may_be_arrays_of_any_integers_but_nothing_else() -> None:
    model = small_model()
    request = Request(Plan(decode_engine(model).shard(0), prefill_engine(model)))
    for dtype in (np.uint32, np.int64, np.uint8):
        request.set([GroupRequest(np.array([5, 1], dtype), np.array(PREFILL_TABLE, dtype), 0, 40)])
        assert request.bytes(0) > 0
    with pytest.raises(InvalidError, match="float64"):
        request.set([GroupRequest(np.array([5.0, 1.0]), PREFILL_TABLE, 0, 40)])
    with pytest.raises(InvalidError, match="2 dimensions"):
        request.set([GroupRequest(np.array([[5, 1]]), PREFILL_TABLE, 0, 40)])


@pytest.mark.parametrize("none", [(0, 0), range(1, 1), range(2, 1)])
def test_a_plan_of_no_layers_reads_nothing(none: range | tuple[int, int]) -> None:
    model = small_model()
    local, remote = decode_engine(model), prefill_engine(model)
    assert Plan(local.shard(0), remote).sources != []
    assert Plan(local.shard(0), remote, layers=none).sources == []


def test_block_ids_are_read_where_they_lie_unless_c_could_not_read_them_there() -> None:
    def address_of(ids: Any) -> int:
        pointer, count = Arena().ids(ids)
        assert ffi.unpack(pointer, count) == [5, 1]
        return int(ffi.cast("uintptr_t", pointer))

    ids = np.array([5, 1], np.uint32)
    assert address_of(ids) == ids.ctypes.data
    between = np.frombuffer(bytearray(b"-" + ids.tobytes()), np.uint32, offset=1)
    assert between.ctypes.data % 4 != 0
    assert address_of(between) % 4 == 0
    assert address_of(ids.astype(">u4")) % 4 == 0


def test_the_wrong_number_of_groups_is_refused() -> None:
    model = small_model()
    with pytest.raises(InvalidError):
        Request(Plan(decode_engine(model).shard(0), prefill_engine(model)), [])
    with pytest.raises(InvalidError, match="1 groups"):
        Engine(model, groups=[GroupSpec(1), GroupSpec(1)])


def test_numbers_that_do_not_fit_are_errors_of_kvferry() -> None:
    with pytest.raises(OutOfRangeError, match="block_count"):
        Engine(small_model(), GroupSpec(block_count=-1))
    with pytest.raises(InvalidError, match="tokens_per_block"):
        Engine(small_model(), GroupSpec(block_count=1, tokens_per_block="16"))  # type: ignore[arg-type]


def test_text_that_is_none_is_an_error_of_kvferry() -> None:
    with pytest.raises(InvalidError, match="b'p' is of type bytes; allowed: text"):
        Engine(small_model(), GroupSpec(block_count=1), name=b"p")  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="2 is of type int; allowed: text"):
        Model([Group("full", (0,), (Part("k", 2, 4, 8),))])  # type: ignore[arg-type]


def test_objects_that_depend_on_a_closed_one_go_on_working() -> None:
    model = small_model()
    decode, prefill = decode_engine(model), prefill_engine(model)
    shard = decode.shard(0)
    plan = Plan(shard, prefill)
    request = Request(plan, [GroupRequest([5, 1], PREFILL_TABLE, 0, 40)])
    for thing in (model, decode, prefill, shard, plan):
        thing.close()
        thing.close()
    del model, decode, prefill, shard
    assert request.bytes(0) > 0
    for use in (lambda: plan.sources, plan.verify, lambda: Request(plan)):
        with pytest.raises(ClosedError, match="Plan was closed"):
            use()


def test_objects_of_a_cycle_are_freed_in_the_right_order() -> None:
    for order in range(6):
        model = small_model()
        plan = Plan(decode_engine(model).shard(0), prefill_engine(model))
        made: list[object] = [Request(plan, [GroupRequest([5, 1], PREFILL_TABLE, 0, 40)]), plan, model]
        made = made[order % 3 :] + made[: order % 3]
        if order >= 3:
            made.reverse()
        made.append(made)
        del model, plan, made
        gc.collect()


def test_handles_are_context_managers() -> None:
    with small_model() as model:
        assert not model.closed
    assert model.closed
    assert repr(model) == "<Model, closed>"


def test_every_status_of_the_library_has_its_own_exception() -> None:
    from kvferry._binding import lib
    from kvferry.errors import CLASSES, error_of

    statuses = {getattr(lib, name) for name in dir(lib) if name.startswith("KVF_E_")}
    assert statuses == set(CLASSES)
    for status in statuses:
        error = error_of(status, "a sentence")
        assert (error.status, error.detail, str(error)) == (status, "a sentence", "a sentence")
    assert type(error_of(99, "")) is kvferry.KvferryError


def test_the_version_is_the_librarys() -> None:
    assert kvferry.__version__ == kvferry.version() != ""
