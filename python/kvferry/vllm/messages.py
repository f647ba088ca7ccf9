"""Messages between the scheduler's half and the workers' halves of the connector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.request import BlockTable
from kvferry.scheduler import Instruction
from kvferry.vllm.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvferry.vllm.geometry import RankGeometry


@dataclass
class KvferryHandshake(KVConnectorHandshakeMetadata):
    """A rank's message to the scheduler's half when the caches are there.

    Attributes:
        weights: their identity; "" if they are not compared
        others: the messages of all ranks, if vLLM cannot pass on each: it names ranks by pipeline stage and
            tensor-parallel rank, which several ranks share under prefill context parallelism
    """

    introduction: bytes
    geometry: RankGeometry
    weights: str = ""
    others: tuple[KvferryHandshake, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """What a step computes of a request that is pushed while it is computed.

    Attributes:
        request: its id
        begin, end: the tokens; earlier tokens are computed already
        tables: for each group, blocks that the workers do not know yet
    """

    request: str
    begin: int
    end: int
    tables: list[BlockTable]


@dataclass(frozen=True)
class Prompt:
    """What a prompt's cache was computed from, or is to be.

    Attributes:
        digest: of the tokens and the adapter, as prompt_of() makes it
        tokens: how many, from the first
    """

    digest: str
    tokens: int


@dataclass
class KvferryStep(KVConnectorMetadata):
    """The workers' tasks in a step.

    Attributes:
        instructions: in order
        void: requests for which vLLM waits although nothing was begun: workers report them as failed
        chunks: what the step computes of requests that are pushed meanwhile
        ended: such requests that have finished or were aborted: reported as sent when their push is over
        lost: such requests whose blocks vLLM has taken away; their push is cancelled, and not reported
        idle: no request runs in this step: vLLM only asks whether transfers have ended
        params: of requests that are kept from here on, for an operator who has them handed over
        computes: requests are being computed for peers, and will be kept
        fills: before it computes, vLLM writes zeros or copies of others into new blocks
        prompts: of requests that are pushed while they are computed, and of those that such a push writes
    """

    instructions: list[Instruction] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    idle: bool = False
    params: dict[str, dict[str, Any]] = field(default_factory=dict)
    computes: bool = False
    fills: bool = False
    prompts: dict[str, Prompt] = field(default_factory=dict)


@dataclass
class KvferryReport(KVConnectorWorkerMetadata):
    """What a worker that takes commands says of itself after each step.

    Attributes:
        drains: it takes nothing new
    """

    drains: bool

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The engine drains if any of its ranks does."""
        assert isinstance(other, KvferryReport)
        return KvferryReport(self.drains or other.drains)
