"""SGLang's kernels of gated delta nets for CPUs, in torch: one token after the other.

The state of a delta rule is [head][element of value][element of key], that of a convolution [channel][token].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def _spans(begins: Tensor) -> Iterator[slice]:
    """The tokens of each request."""
    return itertools.starmap(slice, itertools.pairwise(begins.tolist()))


def _convolve(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The convolution of tokens of one request, [channel][token]; the state becomes that of the last ones."""
    both = torch.cat([state.to(x.dtype), x], dim=1)
    state.copy_(both[:, -state.shape[1] :])
    found = F.conv1d(both[None], weight[:, None], bias, groups=len(weight))[0]
    return F.silu(found) if activation in ("silu", "swish") else found


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int],
) -> Tensor:
    """The convolution of the new tokens of requests, one request behind the other."""
    out = torch.zeros_like(x)
    for mine, slot, goes_on in zip(
        _spans(query_start_loc), cache_indices.tolist(), has_initial_state.tolist(), strict=True
    ):
        if not goes_on:
            conv_states[slot].zero_()
        out[:, mine] = _convolve(x[:, mine], conv_states[slot], weight, bias, activation)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Likewise, of one token of each request, [request][channel]."""
    found = [
        _convolve(token[:, None], conv_states[slot], weight, bias, activation)[:, 0]
        for token, slot in zip(x, conv_state_indices.tolist(), strict=True)
    ]
    return torch.stack(found)


def fused_gdn_gating_cpu(decay: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """By what a state decays, as a logarithm, and how much of a token it takes up: [1][token][head]."""
    return (-decay.float().exp() * F.softplus(a.float() + bias))[None], b.float().sigmoid()[None]


def _unit(x: Tensor, heads: int) -> Tensor:
    """Keys or queries of length 1, one for each head of the values."""
    return F.normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(heads // x.shape[-2], -2)


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """What the tokens of requests, [1][token][head][element], find in the states, which take them up."""
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("the stand-in takes tokens first, and normalizes keys")
    heads = v.shape[2]
    queries, keys = _unit(q[0], heads) * q.shape[-1] ** -0.5, _unit(k[0], heads)
    out = torch.zeros_like(v)
    for mine, slot in zip(_spans(cu_seqlens), initial_state_indices.tolist(), strict=True):
        state = initial_state[slot].float()
        for token in range(mine.start, mine.stop):
            key = keys[token][:, None]
            state *= g[0, token].float().exp()[:, None, None]
            news = v[0, token].float() - (state * key).sum(-1)
            state += (beta[0, token].float()[:, None] * news)[..., None] * key
            out[0, token] = (state * queries[token][:, None]).sum(-1)
        initial_state[slot] = state
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> Tensor:
    """Likewise, of one token of each request."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )[0]


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Rows of equal size, each weighed by its gate."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype) * F.silu(gate)


for _kernel in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu, fused_rmsnorm_gated_cpu):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)
