"""The cases: two servers of a shape, and what is done with them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from models import EAGLE
from servers import AMX, Side


class What(enum.Enum):
    """What a case does."""

    HAND_OVER = "hand over"
    DRAFTS = "drafts"
    PREFIXES = "prefixes"
    FAULTS = "faults"
    MISMATCH = "mismatch"
    STAGES = "stages"
    WRONG_KEY = "wrong key"


PLAIN = Side()
PAGES = Side(page=16)
# By default states of convolutions are rounded, so tokens would not be transformers'.
STATE_TYPE = (("SGLANG_MAMBA_CONV_DTYPE", "float32"),)
# Beside states, SGLang keeps prefixes without a GPU only in pages of one token.
GATED = Side(page=16, arguments=("--disable-radix-cache",), environment=STATE_TYPE)
# Queries, keys and values go through the convolution; values are as many as both others.
GATED_STATES = ((1, 1, 2), (1,))


@dataclass(frozen=True)
class Case:
    """Two servers.

    Attributes:
        decode_model: of the decode server; "": the prefill server's
        keys: the servers have keys and allow only each other
        states: of each tensor of a state, how its parts relate in size, each of which the ranks share
        latent: the model caches latents, not heads
        patience: seconds after which SGLang gives a request up
    """

    model: str = "llama"
    prefill: Side = PAGES
    decode: Side = PAGES
    what: What = What.HAND_OVER
    decode_model: str = ""
    keys: bool = False
    states: tuple[tuple[int, ...], ...] = ()
    latent: bool = False
    patience: int = 60


CASES = {
    "pages-1": Case(prefill=PLAIN, decode=PLAIN),
    "pages-1-16": Case(prefill=PLAIN),
    "pages-64-16": Case("qwen3", Side(page=64, arguments=("--chunked-prefill-size", "128"))),
    "chunks": Case("qwen3", Side(page=16, arguments=("--chunked-prefill-size", "64"))),
    "tp1-tp2": Case(decode=Side(page=16, tp=2)),
    "tp2-tp1": Case(prefill=Side(page=16, tp=2)),
    "pp2-pp1": Case(prefill=Side(page=16, pp=2)),
    "latents-tp2-tp1": Case(
        "latents", Side(page=64, tp=2, attention=AMX), Side(page=16, attention=AMX), latent=True
    ),
    "windows-tp1-tp2": Case(
        "windows",
        Side(page=16, attention=AMX, arguments=("--chunked-prefill-size", "128")),
        Side(page=16, tp=2, attention=AMX),
    ),
    "states-64-16": Case("states", replace(GATED, page=64), GATED, states=GATED_STATES),
    "states-tp1-tp2": Case("states", GATED, replace(GATED, tp=2), states=GATED_STATES),
    "states-tp2-tp1": Case(
        "states",
        replace(GATED, tp=2, arguments=(*GATED.arguments, "--chunked-prefill-size", "64")),
        GATED,
        states=GATED_STATES,
    ),
    "states-prefixes": Case(
        "states",
        Side(environment=STATE_TYPE),
        Side(environment=STATE_TYPE, arguments=("--disaggregation-decode-enable-radix-cache",)),
        what=What.PREFIXES,
        states=GATED_STATES,
    ),
    "keys": Case(keys=True),
    "eagle-64-16": Case("llama-one", Side(page=64, draft=EAGLE), Side(page=16, draft=EAGLE), what=What.DRAFTS),
    "eagle-tp2-tp1": Case(
        "llama-one",
        Side(page=16, tp=2, draft=EAGLE, arguments=("--chunked-prefill-size", "64")),
        Side(page=16, draft=EAGLE),
        what=What.DRAFTS,
    ),
    "prefixes": Case(
        prefill=Side(page=64),
        decode=Side(page=16, arguments=("--disaggregation-decode-enable-radix-cache",)),
        what=What.PREFIXES,
    ),
    "eagle-prefixes": Case(
        "llama-one",
        prefill=Side(page=64, draft=EAGLE),
        decode=Side(page=16, draft=EAGLE, arguments=("--disaggregation-decode-enable-radix-cache",)),
        what=What.PREFIXES,
    ),
    "faults": Case(what=What.FAULTS, patience=10),
    "mismatch": Case(decode_model="llama-layers", what=What.MISMATCH, patience=10),
    "mismatch-drafts": Case("llama-one", Side(page=16, draft=EAGLE), what=What.MISMATCH, patience=10),
    "stages": Case(decode=Side(page=16, pp=2), what=What.STAGES, patience=10),
    "wrong-key": Case(what=What.WRONG_KEY, keys=True, patience=10),
}
