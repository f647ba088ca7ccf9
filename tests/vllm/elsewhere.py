"""Another engine, llama.cpp: prompts that vLLM's prefill server has computed go on there, and prompts that were
computed there go on in vLLM's decode server.

llama.cpp runs in this process. A context in float32 without flash attention computes what vLLM computes, to
within rounding. Where cells are converted on the way, the context keeps float16, and cells are compared with
its own, not tokens; so are those of models whose tokens prove nothing. The files that read models and call the
library are those of the folder beside.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from asking import NEW_TOKENS, Asking, Judge
from cases import FP8, Tokens
from pair import Pair, answer

from kvferry.errors import KvferryError
from kvferry.llamacpp import Context, SequenceAgent, SequenceCache

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "llamacpp"))
import gguf_models
import llama

LENGTHS = (2, 33, 150, 300)
# How far cells are at least correlated with those that were computed in another precision. With FP8, a layer is
# computed from numbers with a fraction of 3 bits.
ALIKE, ALIKE_IN_FP8 = 0.99, 0.9
SECONDS = 30


class Elsewhere(Asking):
    """Runs all of it."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        super().__init__(judge, pair)
        file = gguf_models.convert(pair.prefill.model, pair.readout / "model.gguf")
        library = llama.load_library()
        converted = pair.case.converts
        self._by_cells = converted or pair.case.tokens is Tokens.NOTHING
        self._alike = ALIKE_IN_FP8 if pair.case.prefill.arguments == FP8 else ALIKE
        kind = llama.F16 if converted else llama.F32
        self._engine = llama.Llama(library, file, gguf_models.VOCABULARY, kind=kind, flash=converted)
        self._context = Context(library, self._engine.context)
        self._engine.compute([5, 6, 7], 0)
        self._cache = self._context.cache(self._context.save(0))
        self._engine.forget(0)

    def run(self) -> None:
        """All of it."""
        try:
            groups = self.groups()
            with SequenceAgent(self._cache, 1024, tokens_per_page=48, groups=groups) as agent:
                for length in LENGTHS:
                    self._length = length
                    if self._by_cells:
                        self.alike(f"{length} tokens from vLLM", agent)
                        continue
                    self.from_vllm(f"{length} tokens from vLLM", agent)
                    self.to_vllm(f"{length} tokens to vLLM", agent)
                self.declined(agent)
            with SequenceAgent(self._cache, 1024, weights="others", groups=groups) as agent:
                self.refused(agent)
        finally:
            self._engine.close()
        self.settled("all of it")

    def groups(self) -> Any:
        """The layers of each of vLLM's groups."""
        params = self._pair.params(self.prompt())
        groups = params["kvferry_groups"]
        with SequenceAgent(self._cache, 1024, groups=groups) as agent:
            agent.decline(params)
        self.record(f"groups of layers: {groups}")
        return groups

    def here(self, prompt: list[int]) -> list[int]:
        """The tokens that llama.cpp computes itself."""
        first = self._engine.compute(prompt, 0)
        found = [first, *self._engine.go_on(first, len(prompt), NEW_TOKENS - 1)]
        self._engine.forget(0)
        return found

    def goes_on(self, prompt: list[int], state: Any) -> list[int]:
        """The tokens after a prompt of which all but the last token are in a state."""
        self._context.restore(1, state)
        return self._engine.go_on(prompt[-1], len(prompt) - 1, NEW_TOKENS, 1)

    def from_vllm(self, what: str, agent: SequenceAgent) -> None:
        """vLLM computes the prompt."""
        prompt = self.prompt()
        want = self.here(prompt)
        self.judge(f"{what}: vLLM's tokens are the same", self.alone(prompt) == want)
        params = self._pair.params(prompt)
        state = agent.load(params, len(prompt) - 1).wait(SECONDS)
        got = self.goes_on(prompt, state)
        self.judge(f"{what}: same tokens", got == want, f"{got} not {want}")
        _negate(self._cache, state)
        got = self.goes_on(prompt, state)
        self.judge(f"{what}: other tokens with a wrong cache", got != want)

    def alike(self, what: str, agent: SequenceAgent) -> None:
        """vLLM computes the prompt in another precision."""
        prompt = self.prompt()
        state = agent.load(self._pair.params(prompt)).wait(SECONDS)
        self._engine.compute(prompt, 0)
        own = _numbers(self._cache, self._context.save(0))
        self._engine.forget(0)
        found = float(np.corrcoef(own, _numbers(self._cache, state))[0, 1])
        self.judge(f"{what}: cells are alike ({found:.4f})", found > self._alike)
        self._context.restore(1, state)
        self._engine.compute([5], len(prompt), 1)
        # A control: those of the tokens in reverse.
        for layer in self._cache.read(state):
            layer.keys[...], layer.values[...] = layer.keys[::-1].copy(), layer.values[::-1].copy()
        found = float(np.corrcoef(own, _numbers(self._cache, state))[0, 1])
        self.judge(f"{what}: those of a wrong cache are not ({found:.4f})", found < self._alike)

    def to_vllm(self, what: str, agent: SequenceAgent) -> None:
        """llama.cpp computes the prompt."""
        prompt = self.prompt()
        want = self.alone(prompt)
        self._engine.compute(prompt, 0)
        state = self._context.save(0)
        self._engine.forget(0)
        self.same(what, prompt, agent.lend(state), loads=True, want=want)
        _negate(self._cache, state)
        got = answer(self._decode.ask(prompt, NEW_TOKENS, agent.lend(state))).tokens
        self.judge(f"{what}: other tokens with a wrong cache", got != want)

    def declined(self, agent: SequenceAgent) -> None:
        """What nobody wants is free in vLLM."""
        agent.decline(self._pair.params(self.prompt()))

    def refused(self, agent: SequenceAgent) -> None:
        """Weights of another name."""
        params = self._pair.params(self.prompt())
        self.judge("other weights are refused", _raises(lambda: agent.load(params), "kvferry_weights is None"))
        forged = {**params, "kvferry_weights": "others"}
        self.judge(
            "other weights are refused by the engine itself",
            _raises(lambda: agent.load(forged, deadline=5).wait(SECONDS), "weights"),
        )
        with SequenceAgent(self._cache, 1024, groups=params["kvferry_groups"]) as other:
            other.decline(params)


def _negate(cache: SequenceCache, state: Any) -> None:
    """Gives all numbers of a state in float32 the other sign."""
    for layer in cache.read(state):
        layer.keys[...] ^= 1 << 31
        layer.values[...] ^= 1 << 31


def _numbers(cache: SequenceCache, state: Any) -> Any:
    """All keys and values of a state in float16 or float32."""
    sides = [side for layer in cache.read(state) for side in (layer.keys, layer.values)]
    return np.concatenate([side.view(f"<f{side.itemsize}").astype("f4").ravel() for side in sides])


def _raises(call: Callable[[], object], message: str) -> bool:
    try:
        call()
    except KvferryError as error:
        return message in str(error)
    return False
