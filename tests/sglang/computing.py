"""Makes SGLang's backend "intel_amx" compute on any processor: with the kernels of stand_ins, and with torch.

That backend speculates, and computes windows and latents.
"""

from __future__ import annotations

from sglang.srt.mem_cache import allocation
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod
from sglang.srt.runtime_context import override_platform

_PLATFORM = override_platform(has_amx=True)


def install() -> None:
    """For the life of the process."""
    _PLATFORM.__enter__()  # or SGLang takes "torch_native"
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    # Queries look at latents, also in a prefill.
    AttentionBackendRegistry.register("intel_amx", lambda attention, batch: AttnForwardMethod.MLA)
