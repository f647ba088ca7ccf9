"""What the scheduler's half and the workers' halves of the connector tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.request import BlockTable
from kvferry.scheduler import Instruction
from kvferry.vllm.compat import KVConnectorHandshakeMetadata, KVConnectorMetadata
from kvferry.vllm.geometry import RankGeometry


@dataclass
class KvferryHandshake(KVConnectorHandshakeMetadata):
    """What the scheduler's half learns from a rank when the caches are there.

    Attributes:
        weights: their identity; "" where they are not compared
        others: what all ranks say, where vLLM does not pass on what each says: it knows ranks by pipeline
            stage and tensor-parallel rank, which several have under prefill context parallelism
    """

    introduction: bytes
    geometry: RankGeometry
    weights: str = ""
    others: tuple[KvferryHandshake, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """What a step computes of a request that is written while it is computed.

    Attributes:
        request: its id
        begin, end: the tokens; those before are computed
        tables: blocks that the workers do not know yet, of each group
    """

    request: str
    begin: int
    end: int
    tables: list[BlockTable]


@dataclass
class KvferryStep(KVConnectorMetadata):
    """What the workers do in a step.

    Attributes:
        instructions: in order
        void: requests that vLLM waits for although nothing was begun for them: to report as failed
        chunks: what the step computes of requests that are pushed meanwhile
        ended: such requests that have finished or were aborted: to report as sent when their push is over
        lost: such requests whose blocks vLLM has taken away; their push is cancelled, and not to be reported
        idle: no request runs in this step: vLLM only asks whether transfers have ended
    """

    instructions: list[Instruction] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    idle: bool = False
