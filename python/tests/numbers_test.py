"""Numbers that their C type does not hold: the error is kvferry's own, also of functions that cannot fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinates import decode_engine, small_model
from kvferry import Histogram, OutOfRangeError, Plan, Request
from kvferry.block_lists import blocks_per_window
from kvferry.rules import lease_expired, prefill_token_count
from kvferry.topology import needs_split, physical_heads

MODEL = small_model()
ENGINE = decode_engine(MODEL)
PLAN = Plan(ENGINE.shard(0), ENGINE)
REQUEST = Request(PLAN)
TOO_MANY = 2**64

CALLS: dict[str, Callable[[int], object]] = {
    "kvf_prefill_token_count: argument 1": prefill_token_count,
    "kvf_prefill_token_count: argument 3": lambda number: prefill_token_count(1, True, number),
    "kvf_lease_expired: argument 1": lambda number: lease_expired(number, 1),
    "kvf_lease_expired: argument 4": lambda number: lease_expired(1, 1, margin_ns=number),
    "kvf_blocks_per_window: argument 1": lambda number: blocks_per_window(number, 16),
    "kvf_physical_heads: argument 2": lambda number: physical_heads(8, number),
    "kvf_needs_split: argument 3": lambda number: needs_split(False, 2, number),
    "kvf_group_first_needed: argument 2": MODEL.groups[0].first_needed,
    "kvf_shard_group_layers: argument 2": ENGINE.shard(0).group_layers,
    "kvf_shard_placement: argument 4": lambda number: ENGINE.shard(0).placement(0, 0, number),
    "kvf_plan_source_rules: argument 2": PLAN.source_rules,
    "kvf_request_steps: argument 2": REQUEST.steps,
    "kvf_request_bytes: argument 2": REQUEST.bytes,
    "kvf_request_run_count: argument 2": REQUEST.run_count,
}


@pytest.mark.parametrize("number", [-1, TOO_MANY])
@pytest.mark.parametrize("where", CALLS)
def test_the_error_names_function_and_argument(where: str, number: int) -> None:
    with pytest.raises(OutOfRangeError, match=rf"^{where} is {number}; allowed: 0 to \d+$"):
        CALLS[where](number)


def test_a_histogram_names_its_field() -> None:
    with pytest.raises(OutOfRangeError, match=r"^sum_ns is -1; allowed: 0 to \d+$"):
        Histogram(1, -1, 0, 0, (1,)).quantile(0.5)
