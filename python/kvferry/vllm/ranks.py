"""The position of a rank in its engine, and the heads and tokens that it keeps.

vLLM numbers ranks stage by stage, in a stage by prefill context rank, and then by tensor-parallel rank. Only
decode context parallelism splits tokens, over groups of neighbours in another order of ranks, in which the
prefill context ranks of one tensor-parallel rank come first:

    TP 2, prefill context 2    place 0: tp 0, pcp 0    place 1: tp 0, pcp 1    place 2: tp 1, pcp 0    ...
                               decode context 2: places (0, 1) and (2, 3); 4: all of them

Without it, ranks of prefill context parallelism keep copies: each has all tokens.

A block of a request has the same id on every rank. If n ranks share tokens, a block stands for n times the
tokens for which each rank has room, and each rank keeps its own densely: the first of them in the first row.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import UnsupportedError
from kvferry.shard import PartShare, TokenShare

ALL_TOKENS = TokenShare()


@dataclass(frozen=True)
class Ranks:
    """The position of a rank.

    Attributes:
        dcp_size: ranks that share the tokens of a sequence
        interleave: number of neighbouring tokens that one of them keeps
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    pcp_rank: int = 0
    pcp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1

    @property
    def place(self) -> int:
        """Its place in the order in which tokens are distributed."""
        return self.tp_rank * self.pcp_size + self.pcp_rank

    def tokens(self, block_size: int) -> TokenShare:
        """The tokens it keeps of a distributed cache, in blocks of `block_size` of its own tokens."""
        if self.dcp_size == 1:
            return ALL_TOKENS
        if block_size % self.interleave:
            raise UnsupportedError(
                f"cp_kv_cache_interleave_size is {self.interleave}; allowed: divisors of the block size, "
                f"{block_size}"
            )
        return TokenShare(self.place % self.dcp_size, self.dcp_size, self.interleave)

    def share(self, units: int, shards: int, tokens: TokenShare) -> PartShare:
        """What it holds of a part whose units are split into `shards` different shards, and of their tokens."""
        copies = self.tp_size * self.pcp_size // shards
        if copies % tokens.count:
            raise UnsupportedError(
                f"decode_context_parallel_size is {tokens.count}, and {copies} ranks have the same heads; "
                f"allowed: what divides {copies}"
            )
        shard, copy = divmod(self.place, copies)
        each = units // shards
        return PartShare(range(shard * each, (shard + 1) * each), copy // tokens.count, copies // tokens.count)
