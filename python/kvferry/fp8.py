"""What an engine that keeps its cache in FP8 has in it."""

from __future__ import annotations

import torch

from kvferry.model import Dtype

#: torch's names of the types.
NAMES = {Dtype.F8_E4M3: "float8_e4m3fn", Dtype.F8_E5M2: "float8_e5m2"}


def kept_type(dtype: Dtype) -> Dtype:
    """The type of elements that kernels of this machine write where an engine says `dtype`.

    AMD's MI300 and MI325 (gfx94) have FP8 of their own, "FNUZ", in which the same bits are other numbers. The
    library does not know it: such elements are bytes, which move between these machines, and not to others.
    """
    if dtype in NAMES and torch.version.hip and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName:
        return Dtype.U8
    return dtype
