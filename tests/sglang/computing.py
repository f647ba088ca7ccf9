"""Makes SGLang speculate on any processor: with the kernels of stand_ins, and torch in place of Triton."""

from __future__ import annotations

from sglang.srt.mem_cache import allocation
from sglang.srt.runtime_context import override_platform

_PLATFORM = override_platform(has_amx=True)


def install() -> None:
    """For the life of the process."""
    _PLATFORM.__enter__()  # or SGLang takes another backend than intel_amx, which does not speculate
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
