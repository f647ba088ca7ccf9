"""kvferry moves KV caches and model state between LLM inference engines of different shape.

This module has what one request needs: Model, Engine, Plan, Request, Transport, and Agent, which does all of it
between processes that may fail; and what all modules share. The other modules are:

    kvferry.scheduler, kvferry.aggregator, kvferry.rules   what an engine's scheduler needs
    kvferry.postprocess                                    blocks that arrived in another form
    kvferry.topology, kvferry.state, kvferry.block_lists,  the named quantities of vLLM's connectors
    kvferry.descriptors, kvferry.page_groups

See docs/python.md.
"""

from kvferry._native import version
from kvferry.agent import Agent
from kvferry.buffers import Buffer
from kvferry.checksum import checksum_cells, checksum_steps
from kvferry.commands import Command, Reply, ask
from kvferry.contact import Contact, KeyGrant, KeyPair, make_keys
from kvferry.device import CudaEvent, CudaStream, Device, DeviceArray, devices
from kvferry.errors import (
    AgainError,
    CancelledError,
    ClosedError,
    ConfigWarning,
    DeadlineError,
    EmptyError,
    ExistsError,
    InputOutputError,
    InvalidError,
    KvferryError,
    LimitError,
    MismatchError,
    NotExpressibleError,
    NotFoundError,
    NotPermittedError,
    NotRegisteredError,
    OutOfMemoryError,
    OutOfRangeError,
    OverlapError,
    ParseError,
    PeerLostError,
    SizeOverflowError,
    Status,
    UncoveredError,
    UnsupportedError,
)
from kvferry.events import (
    AgentStats,
    BlockClaim,
    BlockState,
    ClockOffset,
    Event,
    EventKind,
    FailurePolicy,
    Histogram,
    LogForm,
    LogLevel,
    LogLine,
    RequestKind,
    Way,
)
from kvferry.kept import KeptRequest
from kvferry.model import (
    Agreement,
    Dtype,
    Group,
    GroupKind,
    GroupMatch,
    Model,
    Part,
    TpRule,
    builtin_models,
    config_families,
)
from kvferry.peers import AgentPeer, PeerRole, PeerState
from kvferry.plan import CopyLane, CopyRule, CostModel, Cut, Plan, Prediction, ReplicaChoice, Strides
from kvferry.records import Record
from kvferry.region import MemoryKind
from kvferry.request import NO_BLOCK, RUN_DTYPE, BlockTable, GroupRequest, GroupSteps, Request
from kvferry.shard import (
    CellLocation,
    Engine,
    GroupShard,
    GroupSpec,
    PartShare,
    Placement,
    RegionAxis,
    RegionView,
    Shard,
    TokenShare,
)
from kvferry.stage import FlowRequest, Stage, StageInfo, StageMove
from kvferry.transfer import Transfer
from kvferry.transport import (
    Direction,
    Finding,
    Operation,
    Peer,
    PeerInfo,
    Transport,
    TransportInfo,
    transport_kinds,
)

__version__ = version()

__all__ = [
    "NO_BLOCK",
    "RUN_DTYPE",
    "AgainError",
    "Agent",
    "AgentPeer",
    "AgentStats",
    "Agreement",
    "BlockClaim",
    "BlockState",
    "BlockTable",
    "Buffer",
    "CancelledError",
    "CellLocation",
    "ClockOffset",
    "ClosedError",
    "Command",
    "ConfigWarning",
    "Contact",
    "CopyLane",
    "CopyRule",
    "CostModel",
    "CudaEvent",
    "CudaStream",
    "Cut",
    "DeadlineError",
    "Device",
    "DeviceArray",
    "Direction",
    "Dtype",
    "EmptyError",
    "Engine",
    "Event",
    "EventKind",
    "ExistsError",
    "FailurePolicy",
    "Finding",
    "FlowRequest",
    "Group",
    "GroupKind",
    "GroupMatch",
    "GroupRequest",
    "GroupShard",
    "GroupSpec",
    "GroupSteps",
    "Histogram",
    "InputOutputError",
    "InvalidError",
    "KeptRequest",
    "KeyGrant",
    "KeyPair",
    "KvferryError",
    "LimitError",
    "LogForm",
    "LogLevel",
    "LogLine",
    "MemoryKind",
    "MismatchError",
    "Model",
    "NotExpressibleError",
    "NotFoundError",
    "NotPermittedError",
    "NotRegisteredError",
    "Operation",
    "OutOfMemoryError",
    "OutOfRangeError",
    "OverlapError",
    "ParseError",
    "Part",
    "PartShare",
    "Peer",
    "PeerInfo",
    "PeerLostError",
    "PeerRole",
    "PeerState",
    "Placement",
    "Plan",
    "Prediction",
    "Record",
    "RegionAxis",
    "RegionView",
    "ReplicaChoice",
    "Reply",
    "Request",
    "RequestKind",
    "Shard",
    "SizeOverflowError",
    "Stage",
    "StageInfo",
    "StageMove",
    "Status",
    "Strides",
    "TokenShare",
    "TpRule",
    "Transfer",
    "Transport",
    "TransportInfo",
    "UncoveredError",
    "UnsupportedError",
    "Way",
    "__version__",
    "ask",
    "builtin_models",
    "checksum_cells",
    "checksum_steps",
    "config_families",
    "devices",
    "make_keys",
    "transport_kinds",
    "version",
]
