"""The cases: two servers of one model in different shapes, and how their answers are judged."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

import without_triton
from servers import MTP, Side


class What(enum.Enum):
    """What a case does with its servers."""

    HAND_OVER = "prompts of all lengths"
    FAULTS = "what a proxy passes on is wrong, clients go away, servers stop for ever or are killed"
    COPYING = "a server is killed, and a client goes away, while bytes are being copied"
    RETRIES = "many requests at once, some aborted, some never taken, some whose parameters are used twice"
    MISMATCH = "the prefill server has another model"
    PREFIXES = "prompts that begin alike, with prefix caches"
    PROXY = "the proxy in front of both, and the requests of public ones"
    TURNS = "a conversation, with prefix caches: answers go back to the prefill server"
    PROXY_TURNS = "a conversation through the proxy, which says where the answer before is"
    ELSEWHERE = "prompts go from vLLM to llama.cpp, and from there to vLLM"
    BESIDE = "another connector beside kvferry's, and vLLM's events"
    ENDING = "the prefill server is given commands, sleeps, wakes and ends, while it keeps a request"
    REFUSED = "what vLLM's CPU build cannot run ends at its start"
    ROLES = "both servers are both roles, keep prefixes, speak encrypted, and have little room"
    REPLICAS = "each server runs two data-parallel replicas, which answer in turn"


class Tokens(enum.Enum):
    """What generated tokens prove. The bytes of both sides are compared cell by cell in any case."""

    ALL = "the decode server's tokens are those it computes alone"
    # : vLLM's step for one token rounds differently from its prefill; the last prompt token is such a step.
    FIRST = "the first token is the same, and its log-probability to within a tolerance"
    # : vLLM alone gives different tokens in the two shapes, or in steps and in a prefill.
    NOTHING = "they are recorded only"


#: Arguments of servers with a cache in FP8, and what torch calls its types.
FP8, E5M2 = (("--kv-cache-dtype", name) for name in ("fp8", "fp8_e5m2"))
CACHE_TYPES = {FP8: "float8_e4m3fn", E5M2: "float8_e5m2"}


@dataclass(frozen=True)
class Case:
    """Two servers of one model."""

    model: str
    prefill: Side
    decode: Side
    dtype: str = "float32"
    prefill_dtype: str = ""  # if it differs: cells are converted on the way
    has_state: bool = False  # the last prompt token is left to the decode server
    tokens: Tokens = Tokens.ALL
    tolerance: float = 0.1  # of the log-probability of the first token, if nothing is converted
    what: What = What.HAND_OVER
    mode: str = "pull"  # who moves the bytes: "push" is the prefill server
    move: str = "auto"  # by which way
    at_once: bool = False  # both are asked at the same time, and layers are written one by one
    both: bool = False  # each server is a prefill and a decode server
    proxied: bool = False  # clients ask the proxy
    lengths: tuple[int, ...] = ()  # of prompts; by default those of all cases

    @property
    def cache_types(self) -> tuple[str, str]:
        """The types of elements in the caches of the prefill and of the decode server, by torch's names."""
        return (
            CACHE_TYPES.get(self.prefill.arguments, self.prefill_dtype or self.dtype),
            CACHE_TYPES.get(self.decode.arguments, self.dtype),
        )

    @property
    def converts(self) -> bool:
        """Whether the two are different."""
        there, here = self.cache_types
        return there != here


def qwen3next(prefill: Side, decode: Side, **how: Any) -> Case:
    """A case of Qwen3-Next: the CPU kernels of gated delta nets need bfloat16."""
    return Case("qwen3next", prefill, decode, dtype="bfloat16", has_state=True, tokens=Tokens.FIRST, **how)


#: Latent attention in float32 on a CPU. By default vLLM uses AMX kernels, if there are any, which refuse it,
#: and one for rotary embedding that rotates nothing of keys and queries that are parts of something larger.
PLAIN_MLA = (
    *("--attention-backend", "CPU_MLA"),
    *("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
)


def deepseek(prefill: int, decode: int, chunks: tuple[str, ...] = (), **how: Any) -> Case:
    """A case of DeepSeek, by tensor-parallel sizes."""
    there, here = Side(tp=prefill, arguments=(*PLAIN_MLA, *chunks)), Side(tp=decode, arguments=PLAIN_MLA)
    return Case("deepseek", there, here, **how)


def deepseek4(prefill: Side, decode: Side, **how: Any) -> Case:
    """A case of DeepSeek V4, of which vLLM builds some metadata with Triton, which has no kernels for CPUs."""
    there, here = (
        replace(side, environment=(*side.environment, (without_triton.SETTING, "1")))
        for side in (prefill, decode)
    )
    return Case("deepseek4", there, here, dtype="bfloat16", **how)


def faults(prefill: Side, decode: Side, **how: Any) -> Case:
    """A case of faults, in which the memory of servers that live through all of them may be judged: the heap
    gives back what is free at its end, so that resident memory follows what is allocated."""
    there, here = (
        replace(side, environment=(("MALLOC_TRIM_THRESHOLD_", "131072"),)) for side in (prefill, decode)
    )
    return Case("llama", there, here, what=What.FAULTS, **how)


# A convolution's state with its channels outermost; by default the steps are outermost.
CHANNELS_FIRST = (("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),)
LONGER = ("--max-model-len", "2048")
LONG = ("--max-model-len", "4096")
# A prompt of 300 tokens is computed in three steps.
CHUNKS = ("--max-num-batched-tokens", "128", "--enable-chunked-prefill")
# A single request of any length must fit.
ROOM = ("--enable-prefix-caching",)
ONE_GROUP = (*ROOM, "--disable-hybrid-kv-cache-manager")
LITTLE_ROOM = (*ROOM, "--num-gpu-blocks-override", "40")

# vLLM drains before it ends, and may be told to sleep.
DRAINS = ("--shutdown-timeout", "180")
OPERATED = (("VLLM_SERVER_DEV_MODE", "1"),)  # and caches may be reset
SLEEPS = (*OPERATED, ("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "120"))

REPLICATED = ("--data-parallel-size", "2")
# vLLM 0.33 gives each replica a memory node of its own, and ends if the machine has fewer nodes, except where
# this variable is set. Its value decides something else: whether cores are shared out as if there were more.
ANY_NODE = (("VLLM_CPU_SIM_MULTI_NUMA", "0"),)

# Proposes tokens: a small model of its own, or a layer that sees the hidden states (MTP: the model's own). They
# have random weights, so that hardly a token is accepted; a model that proposes for itself shows what its cells
# are good for.
DRAFT, EAGLE = "llama_draft", "llama_eagle"
# The prefill server writes each layer while it computes the others.
LAYER_BY_LAYER: dict[str, Any] = {"mode": "push", "at_once": True}

CASES = {
    "llama-64-64": Case("llama", Side(64), Side(64)),
    "llama-128-64": Case("llama", Side(128), Side(64)),
    "llama-64-128": Case("llama", Side(64), Side(128)),
    "llama-32-96": Case("llama", Side(32), Side(96)),
    "llama-tp2-tp1": Case("llama", Side(64, tp=2), Side(128)),
    "llama-tp1-tp2": Case("llama", Side(64), Side(32, tp=2)),
    "llama-push-tp2-tp1": Case("llama", Side(64, tp=2), Side(128), mode="push"),
    "llama-direct": Case("llama", Side(64, tp=2), Side(128), move="direct"),
    "llama-packed": Case("llama", Side(64, tp=2), Side(128), move="packed"),
    "llama-push-packed": Case("llama", Side(64), Side(32, tp=2), mode="push", move="packed"),
    "push-layers": Case("llama", Side(64, tp=2, arguments=CHUNKS), Side(128), **LAYER_BY_LAYER),
    "gemma3-push-layers": Case("gemma3", Side(64, arguments=CHUNKS), Side(32), **LAYER_BY_LAYER),
    "gemma4-push-layers": Case("gemma4", Side(32, arguments=CHUNKS), Side(64, tp=2), **LAYER_BY_LAYER),
    "gptoss-push-layers": Case("gptoss", Side(64, tp=2, arguments=CHUNKS), Side(32), **LAYER_BY_LAYER),
    "deepseek-push-layers": deepseek(2, 1, CHUNKS, **LAYER_BY_LAYER),
    "qwen3next-push-layers": qwen3next(Side(arguments=CHUNKS), Side(), **LAYER_BY_LAYER),
    "granite-push-layers": Case("granite", Side(arguments=CHUNKS), Side(), has_state=True, **LAYER_BY_LAYER),
    # The cells are those of the prefill server, widened bit for bit. It computes in bfloat16, so the first
    # token's log-probability differs from the decode server's own, as the prefill server's does.
    "llama-bf16-f32": Case("llama", Side(64, tp=2), Side(32), prefill_dtype="bfloat16", tokens=Tokens.FIRST),
    "llama-fp8": Case("llama", Side(64, arguments=FP8), Side(32, arguments=FP8), dtype="bfloat16"),
    "llama-bf16-fp8": Case(
        "llama", Side(64, tp=2), Side(32, arguments=FP8), dtype="bfloat16", tokens=Tokens.FIRST
    ),
    "llama-e5m2-f32": Case("llama", Side(32, arguments=E5M2), Side(64, tp=2), tokens=Tokens.NOTHING),
    "draft": Case("llama", Side(64, draft=DRAFT), Side(32, draft=DRAFT)),
    "draft-itself": Case("llama", Side(64, draft="llama"), Side(32, draft="llama")),
    "eagle-tp2-tp1": Case("llama", Side(32, tp=2, draft=EAGLE), Side(64, draft=EAGLE)),
    "draft-prefill": Case("llama", Side(64, draft=DRAFT), Side(32)),
    "draft-decode": Case("llama", Side(64, tp=2), Side(32, draft=DRAFT)),
    "mtp-64-32": Case("glm_mtp", Side(64, draft=MTP), Side(32, draft=MTP)),
    "mtp-tp2-tp1": Case("glm_mtp", Side(64, tp=2, draft=MTP), Side(32, draft=MTP)),
    "draft-push-layers": Case(
        "llama", Side(64, tp=2, draft=DRAFT, arguments=CHUNKS), Side(32, draft=DRAFT), **LAYER_BY_LAYER
    ),
    "eagle-push": Case("llama", Side(32, draft=EAGLE), Side(64, tp=2, draft=EAGLE), mode="push"),
    "mtp-push-layers": Case(
        "glm_mtp", Side(64, draft=MTP, arguments=CHUNKS), Side(32, tp=2, draft=MTP), **LAYER_BY_LAYER
    ),
    "gemma3-64-32": Case("gemma3", Side(64), Side(32)),
    "gemma3-tp2-tp1": Case("gemma3", Side(32, tp=2), Side(64)),
    "gemma3-tp1-tp2": Case("gemma3", Side(64), Side(32, tp=2)),
    "gemma4-64-32": Case("gemma4", Side(64), Side(32)),
    "gemma4-tp2-tp1": Case("gemma4", Side(64, tp=2), Side(32)),
    "gemma4-tp1-tp2": Case("gemma4", Side(32), Side(64, tp=2)),
    "gemma4-push-64-32": Case("gemma4", Side(64), Side(32), mode="push"),
    "gemma4-push-tp2-tp1": Case("gemma4", Side(64, tp=2), Side(32), mode="push"),
    "gemma4-push-tp1-tp2": Case("gemma4", Side(32), Side(64, tp=2), mode="push"),
    "prefixes": Case("llama", Side(64, arguments=ROOM), Side(32, arguments=ROOM), what=What.PREFIXES),
    "gemma4-prefixes": Case(
        "gemma4", Side(32, tp=2, arguments=ROOM), Side(64, arguments=ROOM), what=What.PREFIXES
    ),
    "gemma4one-tp2-tp1": Case("gemma4_one", Side(32, tp=2), Side(64)),
    "gemma4one-tp1-tp2": Case("gemma4_one", Side(64), Side(32, tp=2)),
    "gptoss-64-32": Case("gptoss", Side(64), Side(32)),
    "gptoss-tp2-tp1": Case("gptoss", Side(64, tp=2), Side(32)),
    "gptoss-tp1-tp2": Case("gptoss", Side(64), Side(32, tp=2)),
    "deepseek": deepseek(1, 1),
    "deepseek-tp2-tp1": deepseek(2, 1),
    "deepseek-tp1-tp2": deepseek(1, 2),
    "deepseek4": deepseek4(Side(), Side()),
    "deepseek4-tp2-tp1": deepseek4(Side(tp=2), Side(), tokens=Tokens.NOTHING),
    "deepseek4-push": deepseek4(Side(), Side(), mode="push"),
    "deepseek4-push-layers": deepseek4(Side(), Side(tp=2), tokens=Tokens.NOTHING, **LAYER_BY_LAYER),
    # Indexers choose among entries once there are more than 512.
    "deepseek4-long": deepseek4(Side(arguments=LONG), Side(arguments=LONG), lengths=(700, 2500)),
    "granite": Case("granite", Side(), Side(), has_state=True),
    "granite-tp2-tp1": Case("granite", Side(tp=2), Side(), has_state=True),
    "granite-tp1-tp2": Case("granite", Side(), Side(tp=2), has_state=True),
    "granite-ds": Case(
        "granite", Side(environment=CHANNELS_FIRST), Side(environment=CHANNELS_FIRST), has_state=True
    ),
    "granite-ds-tp2-tp1": Case("granite", Side(tp=2, environment=CHANNELS_FIRST), Side(), has_state=True),
    "granite-tp1-ds-tp2": Case("granite", Side(), Side(tp=2, environment=CHANNELS_FIRST), has_state=True),
    "graniteone-tp2-tp1": Case("granite_one", Side(tp=2), Side(), has_state=True),
    "graniteone-tp1-tp2": Case("granite_one", Side(), Side(tp=2), has_state=True),
    "lfm2": Case("lfm2", Side(), Side(), has_state=True),
    "lfm2-tp2-tp1": Case("lfm2", Side(tp=2), Side(), has_state=True, tokens=Tokens.NOTHING),
    "lfm2-tp1-ds-tp2": Case(
        "lfm2", Side(), Side(tp=2, environment=CHANNELS_FIRST), has_state=True, tokens=Tokens.NOTHING
    ),
    "qwen3next": qwen3next(Side(), Side()),
    "qwen3next-tp2-tp1": qwen3next(Side(tp=2), Side()),
    "qwen3next-tp1-tp2": qwen3next(Side(), Side(tp=2)),
    "roles-pull": Case(
        "llama", Side(64, arguments=ROOM), Side(32, arguments=LITTLE_ROOM), what=What.ROLES, both=True
    ),
    "roles-push": Case(
        "llama",
        Side(64, arguments=ROOM),
        Side(32, arguments=LITTLE_ROOM),
        what=What.ROLES,
        mode="push",
        both=True,
    ),
    "proxy": Case("llama", Side(64), Side(32), what=What.PROXY),
    "proxy-push": Case("llama", Side(64, arguments=CHUNKS), Side(32), what=What.PROXY, **LAYER_BY_LAYER),
    "replicas": Case(
        "llama",
        Side(64, arguments=REPLICATED, environment=ANY_NODE),
        Side(32, arguments=REPLICATED, environment=ANY_NODE),
        what=What.REPLICAS,
    ),
    "replicas-push": Case(
        "llama",
        Side(32, arguments=REPLICATED, environment=ANY_NODE),
        Side(64, arguments=REPLICATED, environment=ANY_NODE),
        what=What.REPLICAS,
        mode="push",
    ),
    "turns": Case(
        "llama",
        Side(64, arguments=(*ROOM, *LONGER)),
        Side(32, arguments=(*ROOM, *LONGER, "--num-gpu-blocks-override", "120"), environment=OPERATED),
        what=What.TURNS,
        both=True,
    ),
    "turns-push": Case(
        "llama",
        Side(32, arguments=(*ROOM, *LONGER)),
        Side(64, arguments=(*ROOM, *LONGER, "--num-gpu-blocks-override", "60"), environment=OPERATED),
        what=What.TURNS,
        mode="push",
        both=True,
    ),
    "proxy-turns": Case(
        "llama",
        Side(64, arguments=(*ROOM, *LONGER)),
        Side(32, arguments=(*ROOM, *LONGER)),
        what=What.PROXY_TURNS,
        both=True,
    ),
    "beside": Case("llama", Side(64, arguments=ONE_GROUP), Side(32, arguments=ONE_GROUP), what=What.BESIDE),
    "llamacpp-tp2-tp1": Case("llama", Side(64, tp=2), Side(32), what=What.ELSEWHERE),
    "llamacpp-bf16-f16": Case("llama", Side(64, tp=2), Side(32), prefill_dtype="bfloat16", what=What.ELSEWHERE),
    "llamacpp-fp8-f16": Case(
        "llama", Side(64, arguments=FP8), Side(32), prefill_dtype="bfloat16", what=What.ELSEWHERE
    ),
    "llamacpp-deepseek": Case(
        "deepseek_dense",
        Side(tp=2, arguments=PLAIN_MLA),
        Side(arguments=PLAIN_MLA),
        what=What.ELSEWHERE,
    ),
    "llamacpp-gemma3": Case("gemma3", Side(32, tp=2), Side(64), what=What.ELSEWHERE),
    "llamacpp-qwen3": Case("qwen3", Side(32), Side(64, tp=2), what=What.ELSEWHERE),
    "ending": Case("llama", Side(64, arguments=DRAINS, environment=SLEEPS), Side(32), what=What.ENDING),
    "refused": Case("llama", Side(64), Side(64), what=What.REFUSED),
    "faults": faults(Side(64), Side(32)),
    "faults-push": faults(Side(64), Side(32), mode="push"),
    "faults-push-layers": faults(Side(64, arguments=CHUNKS), Side(32), **LAYER_BY_LAYER),
    "faults-roles": faults(Side(64, arguments=CHUNKS), Side(32, arguments=CHUNKS), both=True, **LAYER_BY_LAYER),
    "retries": Case("llama", Side(64), Side(32), what=What.RETRIES),
    "retries-push-layers": Case(
        "llama", Side(64, arguments=CHUNKS), Side(32), what=What.RETRIES, **LAYER_BY_LAYER
    ),
    "copying": Case("llama_large", Side(64, arguments=LONG), Side(32, arguments=LONG), what=What.COPYING),
    "copying-push-layers": Case(
        "llama_large",
        Side(64, arguments=LONG),
        Side(32, arguments=LONG),
        what=What.COPYING,
        **LAYER_BY_LAYER,
    ),
    "copying-proxy": Case(
        "llama_large",
        Side(64, arguments=LONG),
        Side(32, arguments=LONG),
        what=What.COPYING,
        proxied=True,
        **LAYER_BY_LAYER,
    ),
    "mismatch": Case("llama", Side(64), Side(64), what=What.MISMATCH),
    "mismatch-scales": Case(
        "llama_scaled",
        Side(64, arguments=FP8),
        Side(64, arguments=FP8),
        dtype="bfloat16",
        what=What.MISMATCH,
    ),
    "mismatch-push-layers": Case("llama", Side(64), Side(64), what=What.MISMATCH, **LAYER_BY_LAYER),
}

# : Two models, two shapes: the short form.
SHORT = ("gemma4-64-32", "granite-tp2-tp1")
