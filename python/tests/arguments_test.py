"""Arguments of wrong types: each is refused by an error of kvferry's own, and none is cut to fit or crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coordinates import DECODE_TABLE, PREFILL_TABLE, TOKENS, decode_engine, prefill_engine, small_model
from kvferry import (
    Agent,
    BlockTable,
    Contact,
    CostModel,
    Engine,
    GroupRequest,
    GroupSpec,
    GroupSteps,
    InvalidError,
    KeyGrant,
    KvferryError,
    Model,
    OutOfRangeError,
    Plan,
    Record,
    Request,
    Shard,
    Stage,
    Transport,
    checksum_cells,
    checksum_steps,
)
from kvferry.aggregator import Aggregate, Aggregator, GroupBlock, StepRequest, WorkerOutput, step_requests
from kvferry.block_lists import ExchangeGroup, IdSpace, desc_ids, exchange_clip, mapped_blocks, prefix_trim
from kvferry.descriptors import CacheMemory, RegionLayout, local_descriptors
from kvferry.page_groups import PagePlan
from kvferry.postprocess import PageForm, PageOrder, ReceivedShape, permute_received
from kvferry.rules import ClockProbe, TransferSamples, clock_offset, prefill_token_count, summarise_transfers
from kvferry.scheduler import Schedule
from kvferry.state import StateModel, StateType, state_shape_of
from kvferry.topology import CacheKind, EngineTransferInfo, Topology, detect_layout, region_order

MODEL = small_model()
PREFILL, DECODE = prefill_engine(MODEL, tp_size=1), decode_engine(MODEL)
SHARD = DECODE.shard(0)
PLAN = Plan(SHARD, PREFILL)
REQUEST = Request(PLAN, [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)])
KINDS = [CacheKind.FULL]
FORM = PageForm(PageOrder.HND, 4)
MEMORY = [np.zeros(size, np.uint8) for size in SHARD.region_bytes]
TOPOLOGY = Topology(tp_size=1, tp_rank=0, block_size=16, total_kv_heads=4)
AGENT = Agent(DECODE, own_thread=False)
CONTACT = Contact("prefill", "tcp://127.0.0.1:9")
STEPS = [GroupSteps(DECODE_TABLE, 0, TOKENS)]
TRANSPORT = Transport("inproc")
NOTHING: Any = object()


class Failing:
    """Has an index, and its own reason not to tell it."""

    def __index__(self) -> int:
        raise RuntimeError("no index today")


# Each takes a whole number.
NUMBERS: dict[str, Callable[[Any], object]] = {
    "layer_count": lambda value: Model(MODEL.groups, layer_count=value),
    "a layer": lambda value: Model([type(MODEL.groups[0])("g", (value,), MODEL.groups[0].parts)]),
    "block_count": lambda value: Engine(MODEL, GroupSpec(value)),
    "tp_size": lambda value: Engine(MODEL, GroupSpec(8), tp_size=value),
    "pp_layers": lambda value: Engine(MODEL, GroupSpec(8), pp_layers=[value]),
    "rank": DECODE.shard,
    "kvf_shard_locate: argument 5": lambda value: SHARD.locate(0, 0, 0, value, 0, 0),
    "a group": lambda value: Plan(SHARD, PREFILL, groups=[value]),
    "kvf_plan_predict: argument 3": lambda value: PLAN.predict(0, value),
    "end": lambda value: REQUEST.set([GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, value)]),
    "first_block": lambda value: REQUEST.set([GroupRequest(BlockTable([1], value), PREFILL_TABLE, 0, 1)]),
    "begin": lambda value: checksum_steps(
        SHARD, MEMORY, group=0, part=0, layers=(value, 1), units=(0, 1), table=DECODE_TABLE, steps=(0, 1)
    ),
    "part": lambda value: checksum_cells(
        SHARD, MEMORY, group=0, part=value, layers=(0, 1), units=(0, 1), table=DECODE_TABLE, step=1
    ),
    "max_in_flight": lambda value: Transport("inproc", max_in_flight=value),
    "a length": lambda value: TRANSPORT.allocate([value]),
    "region": lambda value: TRANSPORT.register_region(value, MEMORY[0], SHARD),
    "consumers": lambda value: AGENT.hold("r", STEPS, consumers=value),
    "priority": lambda value: AGENT.pull("r", CONTACT, STEPS, priority=value),
    "bytes_per_second": lambda value: AGENT.pull("r", CONTACT, STEPS, bytes_per_second=value),
    "kvf_agent_cancel: argument 2": AGENT.cancel,
    "layers": lambda value: AGENT.push_ready(1, (0, 16), value),
    "rank_end": lambda value: AGENT.allow_key(KeyGrant("k", "e", (0, value))),
    "worker_count": Aggregator,
    "block": lambda value: Aggregator(1).step([WorkerOutput(invalid=[GroupBlock(0, value)])]),
    "tokens_per_block": lambda value: Schedule(MODEL, [value]),
    "prompt_tokens": lambda value: Schedule(MODEL, [24]).add("r", value, now_ns=1),
    "kvf_prefill_token_count: argument 1": prefill_token_count,
    "sent_ns": lambda value: clock_offset([ClockProbe(value, 2**40, 1)]),
    "expired": lambda value: summarise_transfers(TransferSamples(expired=value)),
    "heads": lambda value: state_shape_of(StateModel(StateType.MAMBA2, heads=value), 1),
    "kvf_mapped_blocks: argument 2": lambda value: mapped_blocks([1], value),
    "a number": lambda value: mapped_blocks([value], 2),
    "a kind": lambda value: prefix_trim([value], [[1]], [[1]]),
    "attention_blocks": lambda value: desc_ids(IdSpace(1, value), KINDS, [[1]]),
    "region_base": lambda value: local_descriptors(CacheMemory((value,), (16,), 1), RegionLayout.LATENT),
    "block_size": lambda value: TOPOLOGY.tp_ratio(EngineTransferInfo(1, value)),
    "cell_bytes": lambda value: ReceivedShape(1, value, FORM, FORM).scratch_bytes(1),
    "tokens": lambda value: ReceivedShape(1, 1, PageForm(PageOrder.HND, value), FORM).scratch_bytes(1),
}

NO_NUMBERS = {
    "a number with a fraction": 1.5,
    "a number with a fraction of NumPy": np.float32(2.5),
    "a whole number that is a float": np.float64(2.0),
    "an array of a float": np.array(2.5),
    "True": True,
    "True of NumPy": np.bool_(True),
    "text": "1",
    "a list": [1],
    "no number": float("nan"),
    "an object": object(),
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS.keys())
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_whole_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidError, match=rf"^{name} is .*, of type \w+; allowed: (whole numbers|KVF_.*)$"):
        NUMBERS[name](value)


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 2**200])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_no_field_holds_is_refused(name: str, number: int) -> None:
    with pytest.raises(KvferryError):
        NUMBERS[name](number)


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), np.array(3), np.array(3, np.uint32)])
def test_whole_numbers_of_numpy_are_taken(value: Any) -> None:
    assert prefill_token_count(value) == 3
    assert mapped_blocks([value], value) == [9, 10, 11]
    assert Engine(MODEL, GroupSpec(value), tp_size=np.int32(2)).rank_count == 2
    assert PLAN.predict(0, value, CostModel(np.float32(2), np.float64(1.0), 3)).bytes > 0


def test_names_of_a_choice_are_told_to_whom_gives_another_name() -> None:
    with pytest.raises(
        InvalidError, match=r"^way is 'packed', of type str; allowed: KVF_WAY_AUTO, KVF_WAY_DIRECT, "
    ):
        Agent(DECODE, way="packed")  # type: ignore[arg-type]


def test_the_error_of_an_index_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="no index today"):
        prefill_token_count(Failing())  # type: ignore[arg-type]


OTHERS: dict[str, Callable[[Any], object]] = {
    "Model": lambda value: Model(value),
    "Model of such": lambda value: Model([value]),
    "from_config": Model.from_config,
    "Engine": lambda value: Engine(value, GroupSpec(8)),
    "Engine's groups": lambda value: Engine(MODEL, groups=[value]),
    "from_shards": lambda value: Engine.from_shards(MODEL, [value]),
    "Shard's groups": lambda value: Shard(MODEL, layers=(0, 2), region_bytes=[1], groups=[value]),
    "Shard's layers": lambda value: Shard(MODEL, layers=value, region_bytes=[1], groups=SHARD.groups),
    "Plan's shard": lambda value: Plan(value, PREFILL),
    "Plan's engine": lambda value: Plan(SHARD, value),
    "Plan's types": lambda value: Plan(SHARD, PREFILL, convert=[value]),
    "Request": lambda value: Request(value),
    "Request.set": REQUEST.set,
    "Request.set of such": lambda value: REQUEST.set([value]),
    "register": lambda value: TRANSPORT.register(value),
    "register's shard": lambda _: TRANSPORT.register(MEMORY, NOTHING),
    "withheld": lambda _: TRANSPORT.register(MEMORY, withheld=NOTHING),
    "settings": lambda _: Transport("inproc", settings=NOTHING),
    "on_notify": lambda _: Transport("inproc", on_notify=NOTHING),
    "connect": TRANSPORT.connect,
    "allocate": lambda _: TRANSPORT.allocate(NOTHING),
    "dtype": lambda _: TRANSPORT.allocate(8, NOTHING),
    "pull": lambda value: TRANSPORT.pull(value, []),
    "pull's peers": lambda value: TRANSPORT.pull(REQUEST, [value]),
    "push's peer": lambda value: TRANSPORT.push(REQUEST, 0, value),
    "wait": lambda _: TRANSPORT.wait(NOTHING),
    "Stage": lambda value: Stage(value, SHARD),
    "Stage's shard": lambda value: Stage(TRANSPORT, value),
    "Agent": lambda _: Agent(NOTHING),
    "Agent's keys": lambda _: Agent(DECODE, keys=NOTHING),
    "Agent's facts": lambda _: Agent(DECODE, facts=NOTHING),
    "Agent's log": lambda _: Agent(DECODE, log=NOTHING),
    "Agent's lease": lambda _: Agent(DECODE, lease=NOTHING),
    "allow_key": AGENT.allow_key,
    "introduce": AGENT.introduce,
    "Agent.connect": AGENT.connect,
    "hold": lambda value: AGENT.hold("r", [value]),
    "hold's records": lambda value: AGENT.hold("r", STEPS, records=[value]),
    "hold's data": lambda value: AGENT.hold("r", STEPS, records=[Record("a", value)]),
    "push_ready": lambda value: AGENT.push_ready(1, value),
    "reply": AGENT.reply,
    "step": lambda _: Aggregator(1).step([NOTHING]),
    "step_requests": lambda value: step_requests([value], []),
    "a step's groups": lambda _: step_requests([StepRequest("r", NOTHING)], []),
    "Schedule": lambda value: Schedule(value, [24]),
    "update": lambda value: Schedule(MODEL, [24]).update(value),
    "update's blocks": lambda _: Schedule(MODEL, [24]).update(Aggregate(0, 1, invalid=NOTHING)),
    "clock_offset": lambda value: clock_offset([value]),
    "summarise_transfers": summarise_transfers,
    "transfer_seconds": lambda _: summarise_transfers(TransferSamples([NOTHING], [1], [1], [1])),
    "state_shape_of": lambda value: state_shape_of(value, 1),
    "prefix_trim": lambda value: prefix_trim(KINDS, [value], [[1]]),
    "exchange_clip": lambda value: exchange_clip([value], 16, [[1]]),
    "clip_state": lambda _: exchange_clip([ExchangeGroup(CacheKind.FULL)], 16, [[1]], clip_state=NOTHING),
    "local_descriptors": lambda value: local_descriptors(value, RegionLayout.LATENT),
    "tp_ratio": TOPOLOGY.tp_ratio,
    "detect_layout": lambda value: detect_layout(value),
    "region_order": lambda value: region_order([value]),
    "permute_received": lambda value: permute_received(value, [np.zeros((4, 128), np.uint8)], [1]),
    "PagePlan": lambda value: PagePlan(
        tp_size=1,
        tp_rank=0,
        remote_tp_size=1,
        remote_block_size=16,
        groups=value,
        local_page_bytes=1024,
        remote_page_bytes=1024,
        layer_count=2,
        remote_num_blocks=4,
    ),
}


@pytest.mark.parametrize("value", [None, 7, object()], ids=["None", "a number", "an object"])
@pytest.mark.parametrize("where", OTHERS)
def test_an_object_of_another_type_is_refused(where: str, value: Any) -> None:
    with pytest.raises(KvferryError):
        OTHERS[where](value)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidError, match="is not Unicode"):
        Model(MODEL.groups, name="\ud800")
    with pytest.raises(InvalidError, match="is not Unicode"):
        AGENT.cancel(AGENT.hold("\ud800", STEPS))


def test_a_fact_is_one_line() -> None:
    with pytest.raises(InvalidError, match=r"'weights: a\\nrope: b' has more than one line"):
        Agent(DECODE, facts={"weights": "a\nrope: b"})


@pytest.mark.parametrize("ids", [[2**64 - 1], [2**64 - 1, 1], [2**64 - 1, -1], [2**70]])
def test_ids_that_no_type_of_numpy_holds_are_out_of_range(ids: list[int]) -> None:
    with pytest.raises(OutOfRangeError, match=r"^id -?\d+; allowed: 0 to 4294967295$"):
        REQUEST.set([GroupRequest(ids, PREFILL_TABLE, 0, TOKENS)])


def test_ids_that_are_no_list_of_numbers_are_refused() -> None:
    with pytest.raises(InvalidError, match="ids are no list of numbers: "):
        REQUEST.set([GroupRequest([1, [2]], PREFILL_TABLE, 0, TOKENS)])  # type: ignore[list-item]
    for wrong in ([True, 3, 4], [3, np.True_], (False,)):
        with pytest.raises(InvalidError, match=r"^an id is .*, of type bool_?; allowed: whole numbers$"):
            REQUEST.set([GroupRequest(wrong, PREFILL_TABLE, 0, TOKENS)])  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=r"^an id is 1.5, of type float; allowed: whole numbers$"):
        REQUEST.set([GroupRequest([1, 1.5], PREFILL_TABLE, 0, TOKENS)])  # type: ignore[list-item]
