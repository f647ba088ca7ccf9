"""Names of SGLang's kernels for CPUs, which are not on the Python index; SGLang imports these, and calls none.

Where the processor has no AMX, SGLang computes with torch alone.
"""

from typing import Any, NoReturn

NAMES = (
    "copy_all_layer_kv_cache_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
)


def _missing(name: str) -> Any:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in")

    return call


globals().update({name: _missing(name) for name in NAMES})
