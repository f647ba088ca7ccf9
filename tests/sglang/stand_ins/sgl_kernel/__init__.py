"""SGLang's kernels for CPUs, which are not on the Python index, as far as the tests need them, in torch.

Where the processor has no AMX, SGLang computes with torch alone, and imports these names without a call. It
calls them for speculative decoding: drafts are chains (`--speculative-eagle-topk 1`), and attention is that of
its backend `intel_amx`. Those of states are in `mamba`.
"""

from __future__ import annotations

import ctypes

import torch

Tensor = torch.Tensor


def copy_all_layer_kv_cache_cpu(pools: Tensor, strides: Tensor, to: Tensor, source: Tensor) -> None:
    """Moves tokens to other slots of the pools, whose addresses are given."""
    for pool, stride in zip(pools.tolist(), strides.tolist(), strict=True):
        moved = [ctypes.string_at(pool + slot * stride, stride) for slot in source.tolist()]
        for slot, cells in zip(to.tolist(), moved, strict=True):
            ctypes.memmove(pool + slot * stride, cells, stride)


# ---- which slots a request has


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, begins: Tensor, ends: Tensor, slots: Tensor, _: int
) -> None:
    """Enters new slots into the rows of requests, which they come in the order of."""
    first = 0
    for request, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[request, begin:end] = slots[first : first + end - begin]
        first += end - begin


def assign_extend_cache_locs_cpu(
    requests: Tensor, table: Tensor, begins: Tensor, ends: Tensor, slots: Tensor, _: int
) -> None:
    """Reads slots from the rows of requests, one request behind the other."""
    spans = zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True)
    found = torch.cat([table[request, begin:end] for request, begin, end in spans])
    slots[: len(found)] = found


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, width: int, topk: int, steps: int
) -> None:
    """Likewise, for as many tokens behind each request as are drafted."""
    assign_extend_cache_locs_cpu(requests, table, lengths, lengths + topk * steps, slots, width)


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, found: Tensor) -> None:
    """The slots of accepted tokens; those of others are -1."""
    places = accepted[accepted >= 0]
    found[: len(places)] = slots[places]


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    bonus.copy_(tokens.reshape(-1, stride).gather(1, lengths.long().view(-1, 1) - 1).view(-1))


# ---- drafts that are chains


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    chosen: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    following: Tensor,
    sibling: Tensor,
    topk: int,
    steps: int,
    tokens: int,
    mode: int,
) -> None:
    """Drafted tokens follow one another."""
    if topk != 1:
        raise NotImplementedError(f"--speculative-eagle-topk is {topk}; the stand-in takes 1")
    places = torch.arange(tokens)
    positions.copy_((lengths.view(-1, 1) + places).view(-1))
    index.copy_(torch.arange(index.numel()).view_as(index))
    following.copy_(torch.where(places + 1 < tokens, places + 1, -1).expand_as(following))
    sibling.fill_(-1)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accepts drafted tokens as long as they are those that the model gives."""
    accept_index.fill_(-1)
    wanted = target_predict.view_as(candidates)
    for request, (drafted, given) in enumerate(zip(candidates.tolist(), wanted.tolist(), strict=True)):
        count = 0
        while count + 1 < min(len(drafted), accept_index.shape[1]) and drafted[count + 1] == given[count]:
            count += 1
        accept_token_num[request] = count
        places = retrive_index[request, : count + 1]
        accept_index[request, : count + 1] = places
        predicts[places] = wanted[request, : count + 1].to(predicts.dtype)


# ---- attention


def build_draft_decode_metadata_cpu(
    table: Tensor, requests: Tensor, lengths: Tensor, topk: int, steps: int, width: int
) -> Tensor:
    """The slots of each draft; a chain's are those of its request."""
    return table[requests.long()]


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scaling: float, window: int, causal: bool
) -> Tensor:
    """Attention of the last tokens of a request, whose queries are [token][head][element].

    Args:
        slots: of all its tokens
        window: how many tokens one sees; 0: all
    """
    groups = q.shape[1] // keys.shape[1]
    k = keys[slots].repeat_interleave(groups, 1).transpose(0, 1)
    v = values[slots].repeat_interleave(groups, 1).transpose(0, 1)
    scores = q.transpose(0, 1).float() @ k.transpose(1, 2).float() * scaling
    place = torch.arange(len(slots))
    back = place[len(slots) - len(q) :].view(-1, 1) - place  # how far from a query to a key
    unseen = torch.zeros_like(back, dtype=torch.bool)
    if causal:
        unseen |= back < 0
    if window > 0:
        unseen |= back >= window
    return (scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v.float()).transpose(0, 1)


def _plain(cap: float, tree: Tensor | None, sinks: Tensor | None) -> None:
    if cap > 0 or tree is not None or sinks is not None:
        raise NotImplementedError("the stand-in knows neither caps, trees nor sinks")


def extend_attention_cpu(
    q: Tensor,
    _k: Tensor,
    _v: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    _key_scale: float,
    _value_scale: float,
    table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    new_lengths: Tensor,
    begins: Tensor,
    _longest: int,
    scaling: float,
    cap: float,
    _is_cross: bool,
    window: int,
    _encoder_lengths: Tensor | None,
    sinks: Tensor | None,
    tree: Tensor | None,
    causal: bool,
) -> None:
    """Attention of the new tokens of requests, whose keys and values are in the cache already."""
    _plain(cap, tree, sinks)
    of = zip(requests.tolist(), lengths.tolist(), new_lengths.tolist(), begins.tolist(), strict=True)
    for request, length, new, begin in of:
        mine = slice(begin, begin + new)
        slots = table[request, :length].long()
        out[mine] = _attend(q[mine], keys, values, slots, scaling, window, causal).to(out.dtype)


def decode_attention_cpu(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    _key_scale: float,
    _value_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Tensor,
    _logits: Tensor,
    table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    scaling: float,
    cap: float,
    _is_cross: bool,
    window: int,
    _encoder_lengths: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Attention of one token of each request, whose key and value it caches first."""
    _plain(cap, None, sinks)
    if k is not None and v is not None:
        keys[slots.long()] = k.view(-1, *keys.shape[1:]).to(keys.dtype)
        values[slots.long()] = v.view(-1, *values.shape[1:]).to(values.dtype)
    for i, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        found = _attend(q[i : i + 1], keys, values, table[request, :length].long(), scaling, window, True)
        out[i : i + 1] = found.to(out.dtype)


for _kernel in (extend_attention_cpu, decode_attention_cpu):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)
