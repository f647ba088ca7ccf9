"""The quantities that vLLM's connectors name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry import (
    ClosedError,
    ExistsError,
    InvalidError,
    MismatchError,
    NotExpressibleError,
    NotFoundError,
    OutOfRangeError,
)
from kvferry.block_lists import (
    ALL_GROUPS,
    DcpPair,
    ExchangeGroup,
    IdSpace,
    block_ids_by_region,
    blocks_per_window,
    dcp_prefix_trim,
    desc_ids,
    desc_ids_by_layer,
    desc_ids_by_region,
    exchange_clip,
    logical_to_kernel,
    map_block_size,
    mapped_blocks,
    prefix_trim,
    prefix_trim_by_region,
    ssm_state_clip,
    state_blocks,
)
from kvferry.descriptors import (
    CacheMemory,
    EngineTransferPlan,
    RegionLayout,
    compute_split_handle_data,
    local_descriptors,
    local_state_descriptors,
    remote_descriptors,
    remote_state_descriptors,
    split_descriptors,
)
from kvferry.page_groups import PageGroup, PagePlan, flat_desc_ids
from kvferry.state import (
    ByteRun,
    StateModel,
    StateType,
    conv_split,
    local_projection_runs,
    physical_blocks_per_logical,
    remote_projection_runs,
    state_shape_of,
)
from kvferry.topology import (
    CacheKind,
    EngineTransferInfo,
    LayoutFlags,
    Topology,
    detect_layout,
    needs_split,
    physical_head_range,
    physical_heads,
    region_order,
)

FULL, SSM = CacheKind.FULL, CacheKind.SSM
REMOTE = EngineTransferInfo(tp_size=4, block_size=16, block_bytes=2048)


def decode_rank(**changes: object) -> Topology:
    facts = {
        "engine_id": "d",
        "tp_size": 2,
        "tp_rank": 1,
        "block_size": 16,
        "total_kv_heads": 8,
        "block_bytes": 4096,
    }
    return Topology(**(facts | changes))  # type: ignore[arg-type]


def test_ratios_ranks_and_flags_of_twice_as_many_prefill_ranks() -> None:
    rank = decode_rank()
    assert (rank.tp_ratio(REMOTE), rank.block_size_ratio(REMOTE)) == (-2, 1)
    assert rank.handshake_target_ranks(REMOTE) == rank.target_remote_ranks(REMOTE) == [2, 3]
    assert (rank.is_kv_replicated(REMOTE), rank.replicates_kv_cache(REMOTE)) == (False, False)
    assert (rank.local_replicates_kv_cache, rank.dcp_rank, rank.dcp_source_ranks(REMOTE)) == (False, 0, [])
    assert rank.consumers_per_source(REMOTE) == 1
    assert "tp_ratio=-2" in rank.describe(REMOTE)
    assert rank.completion_notice(REMOTE, "abc") == "abc:1"


def test_a_hybrid_knows_sources_and_slots_of_attention_and_state() -> None:
    rank = decode_rank(is_mamba=True)
    assert rank.fa_source_ranks(REMOTE) == rank.state_source_ranks(REMOTE) == [2, 3]
    assert rank.all_source_ranks(REMOTE) == [2, 3]
    assert [rank.fa_head_slot(REMOTE, source) for source in (2, 3)] == [0, 1]
    assert (rank.needs_split_handles(REMOTE), rank.should_skip_fa(REMOTE, 2)) == (True, False)
    assert (rank.fa_descriptor_bytes(REMOTE), rank.fa_rank_offset(REMOTE, 2048)) == (1024, 0)
    with pytest.raises(NotFoundError):
        rank.fa_head_slot(REMOTE, 0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda rank: rank.fa_source_ranks(REMOTE),
        lambda rank: rank.state_source_ranks(REMOTE),
        lambda rank: rank.all_source_ranks(REMOTE),
        lambda rank: rank.fa_head_slot(REMOTE, 2),
        lambda rank: rank.should_skip_fa(REMOTE, 2),
        lambda rank: rank.fa_rank_offset(REMOTE, 2048),
        lambda rank: rank.needs_split_handles(REMOTE),
        lambda rank: rank.fa_descriptor_bytes(REMOTE),
        lambda rank: rank.filter_block_ids_for_rank(REMOTE, [FULL], 2, [[1]], [[2]]),
    ],
)
def test_a_dense_rank_is_asked_nothing_about_state(ask: Callable[[Topology], object]) -> None:
    with pytest.raises(InvalidError, match="is_mamba is false") as raised:
        ask(decode_rank())
    assert raised.value.refusal == "not_hybrid"


def test_a_hybrid_is_described_where_block_lengths_are_not_known() -> None:
    unknown = EngineTransferInfo(tp_size=4, block_size=16)
    text = decode_rank(is_mamba=True, block_bytes=0).describe(unknown)
    assert "remote_block_len=0, fa_reads=2" in text and text.endswith("fa_desc_bytes=0)")


def test_a_mapping_names_the_source_ranks_of_each_group() -> None:
    mapping = decode_rank(is_mamba=True).tp_mapping(REMOTE, [FULL, SSM])
    assert mapping.source_ranks == ((2, 3), (2, 3))
    assert mapping.attention_slot == {2: 0, 3: 1}
    # 2 heads over 4 ranks: neighbours share a head, and each has its own state.
    shared = decode_rank(total_kv_heads=2, is_mamba=True)
    assert shared.tp_mapping(REMOTE, [FULL, SSM]).source_ranks == ((2,), (2, 3))
    assert shared.should_skip_fa(REMOTE, 3)
    lists = shared.filter_block_ids_for_rank(REMOTE, [FULL, SSM], 3, [[1], [2]], [[3], [4]])
    assert lists == ([[], [2]], [[], [4]])


def test_a_shape_that_does_not_divide_is_refused_with_the_connectors_word() -> None:
    with pytest.raises(NotExpressibleError, match="neither divides") as raised:
        decode_rank().tp_ratio(EngineTransferInfo(3, 16))
    assert raised.value.refusal == "tp_not_divisible"
    with pytest.raises(OutOfRangeError) as longer:
        prefix_trim([FULL], [[1, 2, 3]], [[5, 6]])
    assert longer.value.refusal == "decode_longer_than_prefill"
    with pytest.raises(OutOfRangeError, match="tp_size is 0") as plain:
        decode_rank(tp_size=0)
    assert plain.value.refusal == "none"


def test_a_number_that_never_reached_the_library_has_no_word_of_an_earlier_refusal() -> None:
    with pytest.raises(NotExpressibleError):
        decode_rank().tp_ratio(EngineTransferInfo(3, 16))
    with pytest.raises(OutOfRangeError, match="argument 1 is -1") as raised:
        physical_head_range(-1, 8, 0)
    assert raised.value.refusal == "none"


def test_remote_engines_are_registered_once() -> None:
    rank = decode_rank()
    assert rank.register("p", REMOTE) == REMOTE
    assert rank.register("p", EngineTransferInfo(8, 32)) == REMOTE == rank.get("p")
    rank.unregister("p")
    rank.unregister("p")
    with pytest.raises(NotFoundError):
        rank.get("p")
    with pytest.raises(ExistsError):
        rank.register("d", REMOTE)
    rank.close()
    with pytest.raises(ClosedError):
        rank.get("p")


def test_a_check_says_what_would_be_refused_later() -> None:
    three, odd = EngineTransferInfo(3, 16), EngineTransferInfo(4, 16, block_bytes=2000)
    dense, hybrid = decode_rank(), decode_rank(is_mamba=True)
    dense.check(REMOTE)
    assert dense.register("p", three) == three  # as the public connector does
    with pytest.raises(NotExpressibleError) as ratio:
        dense.check(three)
    assert ratio.value.refusal == "tp_not_divisible"
    with pytest.raises(MismatchError, match="2000 for 2") as length:
        hybrid.register("p", odd)
    assert length.value.refusal == "block_len_mismatch"
    with pytest.raises(NotFoundError):
        hybrid.get("p")


def test_an_engine_without_layers_is_refused_as_such() -> None:
    with pytest.raises(InvalidError, match="region_count is 0") as raised:
        local_descriptors(CacheMemory((), (), 4), RegionLayout.PACKED)
    assert raised.value.refusal == "no_layers"


def test_heads_layouts_and_names() -> None:
    assert (physical_heads(8, 4), physical_heads(2, 4), physical_head_range(4, 8, 1)) == (2, 1, range(2, 4))
    assert needs_split(False, -2, 2) and not needs_split(True, -2, 1)
    assert detect_layout([2, 1, 16, 1, 1]) == LayoutFlags(False, False, True)
    assert detect_layout([1, 2, 16, 1, 1]).is_kv_layout_blocks_first
    assert region_order(["l.10", "l.2"]) == ["l.2", "l.10"]


def test_state_comes_apart_into_projections() -> None:
    model = StateModel(
        StateType.MAMBA2, intermediate_size=64, groups=2, heads=4, head_size=16, state_size=8, conv_kernel=4
    )
    shape = state_shape_of(model, 2)
    assert (shape.conv, shape.temporal) == ((48, 3), (2, 16, 8))
    layout = conv_split(model.type, shape, 2, 4)
    assert (layout.projection_dims, layout.conv_bytes, layout.ssm_bytes) == ((32, 8, 8), 288, 1024)
    assert local_projection_runs(layout) == [ByteRun(0, 192), ByteRun(192, 48), ByteRun(240, 48)]
    assert remote_projection_runs(layout, 2, 1) == [ByteRun(192, 192), ByteRun(432, 48), ByteRun(528, 48)]
    assert physical_blocks_per_logical(288, 1024, 1000) == 2
    with pytest.raises(NotExpressibleError):
        state_shape_of(model, 3)


def test_block_lists_are_expanded_trimmed_and_clipped() -> None:
    assert logical_to_kernel([FULL, SSM], [[1, 2], [5]], 3, 2) == [[3, 4, 6, 7], [5]]
    assert mapped_blocks([3], 2) == [6, 7]
    assert map_block_size([FULL], [[1, 2]], [[5, 6, 7]], 2) == [[2, 3, 4]]
    assert prefix_trim([FULL], [[1]], [[5, 6]]) == ([[1]], [[6]])
    assert prefix_trim_by_region([[1], []], [[5, 6], [7]]) == ([[1], []], [[6], []])
    assert dcp_prefix_trim(DcpPair(1, 0, 2, 1), [1, 2], [3]) == ([2], [3])
    assert block_ids_by_region([[1], [2]], [0, ALL_GROUPS]) == [[1], [1, 2]]
    assert blocks_per_window(32, 16) == 3
    assert exchange_clip([ExchangeGroup(CacheKind.SWA, 32)], 16, [[1, 2, 3, 4, 5]]) == [[3, 4, 5]]
    assert ssm_state_clip([1, 2, 3], 1) == [2]
    assert state_blocks(12, 4) == 3
    with pytest.raises(InvalidError, match="equally long"):
        logical_to_kernel([FULL], [[1], [2]], 1, 1)
    with pytest.raises(OutOfRangeError):
        mapped_blocks([-1], 2)


def test_descriptor_ids_count_region_by_region() -> None:
    assert desc_ids(IdSpace(2, 100), [FULL], [[1, 2]]) == [1, 2, 101, 102]
    assert desc_ids_by_region([[1]], [0], [10]) == [1]
    assert desc_ids_by_layer([[1]], [0, 0], [10, 10]) == [1, 11]
    with pytest.raises(OutOfRangeError):
        desc_ids(IdSpace(2, 100), [FULL], [[100]])


def test_descriptor_tables_are_arrays() -> None:
    rank = decode_rank()
    local = CacheMemory((1000000, 2000000), (4096, 4096), 64)
    remote = CacheMemory((10, 20), (2048, 2048), 64)
    whole = local_descriptors(local, RegionLayout.BLOCKS_FIRST)
    assert len(whole.at) == 256 and whole.at[0].tolist() == (1000000, 2048, 0)
    half = split_descriptors(rank, REMOTE, whole, 2)
    assert set(half.at["bytes"].tolist()) == {1024}
    assert len(compute_split_handle_data(decode_rank(is_mamba=True), REMOTE, whole, 2).at) == 256
    theirs = remote_descriptors(
        rank,
        REMOTE,
        layout=RegionLayout.BLOCKS_FIRST,
        local_memory=local,
        remote_memory=remote,
        remote_rank=2,
        region_replicated=[False, False],
    )
    assert theirs.at[0].tolist() == (10, 1024, 0)
    with pytest.raises(InvalidError, match="region_replicated"):
        remote_descriptors(
            rank,
            REMOTE,
            layout=RegionLayout.BLOCKS_FIRST,
            local_memory=local,
            remote_memory=remote,
            remote_rank=2,
            region_replicated=[False],
        )


def test_state_has_descriptors_of_its_own() -> None:
    model = StateModel(
        StateType.MAMBA2, intermediate_size=64, groups=2, heads=4, head_size=16, state_size=8, conv_kernel=4
    )
    layout = conv_split(model.type, state_shape_of(model, 2), 2, 4)
    memory = CacheMemory((0,), (2048,), 4, state=layout)
    assert len(local_state_descriptors(memory).at) == 16  # x, B, C and the recurrent state of 4 blocks
    theirs = conv_split(model.type, state_shape_of(model, 4 // 2), 2, 4)
    table = remote_state_descriptors(
        decode_rank(is_mamba=True),
        EngineTransferInfo(2, 16),
        layout,
        CacheMemory((0,), (2048,), 4, state=theirs),
        1,
    )
    assert table.at["bytes"].sum() == 4 * (layout.conv_bytes + layout.ssm_bytes)


def test_a_transfer_plan_reads_a_request() -> None:
    local = CacheMemory((1000000, 2000000), (4096, 4096), 64)
    remote = [CacheMemory((10, 20), (2048, 2048), 64)] * 4
    rank = decode_rank()
    plan = EngineTransferPlan(
        rank, REMOTE, layout=RegionLayout.BLOCKS_FIRST, kinds=[FULL], local=local, remote_ranks=remote
    )
    rank.close()
    assert plan.mapping.source_ranks == ((2, 3),)
    assert plan.remote_table(0) is None and plan.local_table(17) is None
    split, theirs = plan.split_table(2), plan.remote_table(2)
    assert split is not None and theirs is not None
    reads = plan.read([[1]], [[5, 6]], "x")
    assert (reads.notice, reads.notify_only) == ("x:1", ())
    spec = reads.specs[0]
    assert (spec.remote_rank, spec.local_ids, spec.remote_ids) == (2, (1, 65, 129, 193), (6, 70, 134, 198))
    for (there, here, size), ours, other in zip(spec.copies, spec.local_ids, spec.remote_ids, strict=True):
        assert (there, here) == (theirs.at[other]["address"], split.at[ours]["address"])
        assert size == split.at[ours]["bytes"]
    with pytest.raises(OutOfRangeError):
        plan.read([[99]], [[5]], "x")


def test_pages_of_groups_are_cut_into_pieces() -> None:
    plan = PagePlan(
        tp_size=1,
        tp_rank=0,
        remote_tp_size=1,
        remote_block_size=16,
        groups=[PageGroup(1, 32)],
        local_page_bytes=8192,
        remote_page_bytes=4096,
        layer_count=2,
        remote_num_blocks=10,
    )
    assert (plan.local_to_remote_page_ratio, plan.remote_to_local_page_ratio) == (2, 1)
    assert plan.groups[0].remote_blocks_per_local_block == 2
    assert plan.all_source_ranks == [0] and len(plan.regions) == 2
    assert plan.read([[1]], [[4, 5]], 0, 32) == ([[2, 3]], [[4, 5]])
    assert plan.remote_table([0, 100000]).at["bytes"].max() == 4096
    assert len(plan.local_table([0, 100000], 4).at) == 2 * 4 * 2
    assert flat_desc_ids([[1]], 2, 10) == [1, 11]
    with pytest.raises(InvalidError, match="2 layers"):
        plan.remote_table([0])
