"""Blocks that arrived in another form, in torch tensors, compared with vLLM's own functions."""

from __future__ import annotations

import unittest

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
)

from kvferry.errors import InvalidError
from kvferry.postprocess import (
    PageForm,
    PageOrder,
    ReceivedRequest,
    ReceivedShape,
    block_region,
    copy_blocks,
    finish_received,
    permute_received,
)

BLOCKS, TOKENS, HEADS, SIZE = 6, 8, 3, 4
RECEIVED = [4, 0, 3]  # blocks, in the order of the sequence
HND, NHD = PageOrder.HND, PageOrder.NHD


def received_cache() -> torch.Tensor:
    """A cache of received bytes, whatever they mean: no two elements are equal."""
    count = BLOCKS * TOKENS * HEADS * SIZE
    return torch.arange(count, dtype=torch.int16).view(torch.bfloat16).reshape(BLOCKS, -1)


def shape(received: PageForm, wanted: PageForm) -> ReceivedShape:
    return ReceivedShape(HEADS, SIZE * 2, received, wanted)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


class Received(unittest.TestCase):
    """permute_received() changes a tensor like vLLM's functions."""

    def test_blocks_of_another_size_become_as_vllm_makes_them(self) -> None:
        for ratio in (1, 2, 4):
            ours = received_cache().reshape(BLOCKS, HEADS, TOKENS, SIZE)
            theirs = ours.clone()
            kv_postprocess_blksize_on_receive(theirs, torch.tensor(RECEIVED), ratio)
            permute_received(shape(PageForm(HND, TOKENS // ratio), PageForm(HND, TOKENS)), [ours], RECEIVED)
            self.assertTrue(same_bytes(ours, theirs), ratio)
            changed = not same_bytes(ours, received_cache().reshape(ours.shape))
            self.assertEqual(changed, ratio > 1)

    def test_blocks_of_another_size_and_layout_become_as_vllm_makes_them(self) -> None:
        for ratio in (1, 2, 4):  # 1: only the layout changes
            ours = received_cache().reshape(BLOCKS, TOKENS, HEADS, SIZE)
            theirs = ours.clone()
            indices = torch.tensor(RECEIVED)
            # vLLM's axes are [block, head, token, element], whatever the strides.
            kv_postprocess_blksize_and_layout_on_receive(theirs.transpose(1, 2), indices, ratio)
            permute_received(shape(PageForm(HND, TOKENS // ratio), PageForm(NHD, TOKENS)), [ours], indices)
            self.assertTrue(same_bytes(ours, theirs), ratio)
            self.assertFalse(same_bytes(ours, received_cache().reshape(ours.shape)))

    def test_keys_and_values_of_a_request_are_finished_with_zeros(self) -> None:
        layer = torch.stack([received_cache(), received_cache().flip(0)])
        layer = layer.reshape(2, BLOCKS, HEADS, TOKENS, SIZE)
        wanted = layer.transpose(2, 3).contiguous()[:, RECEIVED].reshape(2, -1, HEADS, SIZE)
        covered = 2 * TOKENS + 3
        form = shape(PageForm(HND, TOKENS), PageForm(NHD, TOKENS))
        finish_received(form, [block_region(layer, split_axis=0)], [ReceivedRequest(RECEIVED, covered)])
        got = layer[:, RECEIVED].reshape(2, -1, HEADS, SIZE)
        self.assertTrue(same_bytes(got[:, :covered], wanted[:, :covered]))
        self.assertFalse(got[:, covered:].view(torch.int16).any())

    def test_views_and_tensors_without_memory_are_refused(self) -> None:
        form = shape(PageForm(HND, TOKENS), PageForm(NHD, TOKENS))
        cache = received_cache().reshape(BLOCKS, HEADS, TOKENS, SIZE)
        with self.assertRaisesRegex(InvalidError, "not C-contiguous"):
            permute_received(form, [cache.transpose(1, 2)], RECEIVED)
        with self.assertRaisesRegex(InvalidError, "holes"):
            permute_received(form, [cache[:, :, ::2]], RECEIVED)
        with self.assertRaises(InvalidError):
            permute_received(form, [torch.empty(cache.shape, dtype=cache.dtype, device="meta")], RECEIVED)
        self.assertTrue(same_bytes(cache, received_cache().reshape(cache.shape)))


class Copied(unittest.TestCase):
    """copy_blocks() takes the arguments of copy_kv_blocks."""

    def test_blocks_go_into_the_cache_and_back(self) -> None:
        staged = {name: received_cache() for name in ("a", "b")}
        staged["b"] = staged["b"].flip(0).contiguous()
        cache = {name: torch.zeros(9, TOKENS * HEADS * SIZE, dtype=torch.bfloat16) for name in ("b", "a")}
        there = [7, 2, 8]
        self.assertEqual(copy_blocks(staged, cache, RECEIVED, there, "h2d"), 3)
        for name in staged:
            self.assertTrue(same_bytes(cache[name][there], staged[name][RECEIVED]))
            others = [block for block in range(9) if block not in there]
            self.assertFalse(cache[name][others].view(torch.int16).any())
        back = {name: torch.zeros_like(layer) for name, layer in staged.items()}
        self.assertEqual(copy_blocks(cache, back, torch.tensor(there), RECEIVED, "d2h"), 3)
        for name in staged:
            self.assertTrue(same_bytes(back[name][RECEIVED], staged[name][RECEIVED]))

    def test_without_pairs_nothing_is_copied(self) -> None:
        cache = torch.zeros(4, 8)
        self.assertEqual(copy_blocks({"a": torch.ones(4, 8)}, {"a": cache}, [1], [1, 2], "h2d"), 0)
        self.assertEqual(copy_blocks({"a": torch.ones(4, 8)}, {"a": cache}, [], [], "d2h"), 0)
        self.assertFalse(cache.any())


if __name__ == "__main__":
    unittest.main()
