"""Makes SGLang's backend "intel_amx" compute on any processor: with the kernels of stand_ins, and with torch.

That backend speculates, and computes windows and latents. Qwen3-Next's states, and its experts, want more.
"""

from __future__ import annotations

import torch
from sglang.kernels.ops.attention.fla import fused_norm_gate
from sglang.srt.mem_cache import allocation
from sglang.srt.models import qwen2_moe
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod
from sglang.srt.runtime_context import override_platform

_PLATFORM = override_platform(has_amx=True)


def _add_shared(x: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
    """Adds what the shared expert says, as far as its gate is open."""
    out += (x @ gate).sigmoid()[:, None] * shared


def install() -> None:
    """For the life of the process."""
    torch.cuda.current_device = torch.cpu.current_device  # Qwen3-Next asks; CUDA's wants a driver
    fused_norm_gate._use_cpu = True  # with the kernel of stand_ins, not Triton's
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_shared
    _PLATFORM.__enter__()  # or SGLang takes "torch_native"
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    # Queries look at latents, also in a prefill.
    AttentionBackendRegistry.register("intel_amx", lambda attention, batch: AttnForwardMethod.MLA)
