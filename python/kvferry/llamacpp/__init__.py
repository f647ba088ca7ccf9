"""llama.cpp: sequences that were computed elsewhere go on here, and the other way round.

See docs/llamacpp.md. The package needs no llama.cpp: it reads and writes the states of sequences. It calls the
library of a context, or asks a server, if the caller names one.
"""

from kvferry.llamacpp.context import Context, RopeType, interleaves, windowed_layers
from kvferry.llamacpp.sections import CacheType
from kvferry.llamacpp.sequences import Arrival, SequenceAgent
from kvferry.llamacpp.slots import Slot, SlotServer, read_slot, write_slot
from kvferry.llamacpp.state import LayerCells, SequenceCache, States

__all__ = [
    "Arrival",
    "CacheType",
    "Context",
    "LayerCells",
    "RopeType",
    "SequenceAgent",
    "SequenceCache",
    "Slot",
    "SlotServer",
    "States",
    "interleaves",
    "read_slot",
    "windowed_layers",
    "write_slot",
]
