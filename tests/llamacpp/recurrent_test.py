"""llama.cpp itself: sequences of models with recurrent layers go on in another context."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import cells
import gguf_models
import llama
import pytest
import state_models as models
from gguf_models import PROMPT, VOCABULARY
from llama import BF16, F16, F32, Q8_0, Llama
from slots_test import Running

from kvferry.errors import InvalidError, KvferryError, LimitError
from kvferry.llamacpp import Context, SequenceAgent, SequenceCache, States

TOKENS = 16
#: All but the last token, which the receiving context computes: a state cannot be taken back to fewer tokens.
BEGIN, LAST = PROMPT[:-1], PROMPT[-1]
KINDS = {F32: "f32", F16: "f16", BF16: "bf16"}
WAYS: tuple[dict[str, Any], ...] = ({}, {"flash": True}, {"unified": False})
HYBRID = ("jamba", "lfm2", "qwen3next")
Made = tuple[ctypes.CDLL, dict[str, pathlib.Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """llama.cpp, and the files of the models."""
    folder = tmp_path_factory.mktemp("models")
    return llama.load_library(), {name: models.make(name, folder) for name in models.MODELS}


@contextmanager
def running(made: Made, model: str, **options: Any) -> Iterator[tuple[Llama, Context]]:
    library, files = made
    engine = Llama(library, files[model], VOCABULARY, **options)
    try:
        yield engine, Context(library, engine.context)
    finally:
        engine.close()


def cache_of(engine: Llama, context: Context) -> SequenceCache:
    engine.compute(PROMPT[:2], 0)
    cache = context.cache(context.save(0))
    engine.forget(0)
    return cache


def tokens_of(engine: Llama) -> list[int]:
    """The tokens that a context computes alone."""
    engine.compute(BEGIN, 0)
    found = engine.go_on(LAST, len(BEGIN), TOKENS)
    engine.forget(0)
    return found


def form_of(model: str, cache: SequenceCache) -> cells.Form:
    """How a state must be written: its numbers are those of the model, and not what the cache says."""
    layers = models.MODELS[model].layers
    r_size, s_size = models.MODELS[model].sizes
    return cells.Form(
        layers.count("a"),
        gguf_models.KV_HEADS,
        models.SIZE,
        models.SIZE,
        cache.key_type.name.lower(),
        cache.value_type.name.lower(),
        False,
        cache.transposed,
        cache.streams,
        recurrent=layers.count("s"),
        r_size=r_size,
        s_size=s_size,
        model_layers=len(layers),
    )


@pytest.mark.parametrize(
    ("model", "there", "here"), list(itertools.product(models.MODELS, WAYS, WAYS)), ids=str
)
def test_a_prompt_goes_on_in_another_context(
    made: Made, model: str, there: dict[str, Any], here: dict[str, Any]
) -> None:
    with running(made, model, **there) as (prefill, saved), running(made, model, **here) as (decode, restored):
        alone = tokens_of(decode)
        with (
            SequenceAgent(cache_of(prefill, saved), 512, tokens_per_page=16) as lender,
            SequenceAgent(cache_of(decode, restored), 512, tokens_per_page=48) as loader,
        ):
            prefill.compute(BEGIN, 0)
            params = lender.lend(saved.save(0))
            prefill.forget(0)  # its copy was lent
            state = loader.load(params, len(BEGIN)).wait(20)
        decode.compute(PROMPT[20:60], 0, 1)  # another sequence is in the context
        restored.restore(2, state)
        assert decode.go_on(LAST, len(BEGIN), TOKENS, 2) == alone

        # Equal tokens prove something only if wrong states give different ones: of fewer tokens, or none.
        decode.compute(BEGIN[:-1], 0, 3)
        layers = loader.cache.read(state)
        others = loader.cache.read(restored.save(3))
        for layer in loader.cache.recurrent:
            layers[layer].keys[...], layers[layer].values[...] = others[layer].keys, others[layer].values
        restored.restore(3, state)
        assert decode.go_on(LAST, len(BEGIN), TOKENS, 3) != alone
        for layer in loader.cache.recurrent:
            layers[layer].keys[...], layers[layer].values[...] = 0, 0
        restored.restore(3, state)
        assert decode.go_on(LAST, len(BEGIN), TOKENS, 3) != alone


@pytest.mark.parametrize("model", HYBRID)
def test_keys_and_values_beside_states_count(made: Made, model: str) -> None:
    """A control: states alone do not give the tokens."""
    with running(made, model) as (engine, context):
        alone = tokens_of(engine)
        engine.compute(BEGIN, 0)
        state = context.save(0)
        cache = context.cache(state)
        layers = cache.read(state)
        for layer in range(cache.layers):
            layers[layer].values[...] = layers[layer].values[::-1].copy()
        context.restore(1, state)
        assert engine.go_on(LAST, len(BEGIN), TOKENS, 1) != alone


@pytest.mark.parametrize("model", models.MODELS)
@pytest.mark.parametrize(("there", "here"), ((F32, F32), (F16, F16), (F32, F16), (BF16, F32)), ids=KINDS.get)
def test_numbers_are_those_that_were_saved(made: Made, model: str, there: int, here: int) -> None:
    """What the other context then saves itself is compared. Types are those of keys and values."""
    with (
        running(made, model, kind=there, flash=True) as (prefill, saved),
        running(made, model, kind=here, flash=True, unified=False) as (decode, restored),
        SequenceAgent(cache_of(prefill, saved), 128) as lender,
        SequenceAgent(cache_of(decode, restored), 128) as loader,
    ):
        prefill.compute(PROMPT, 0)
        state = saved.save(0)
        restored.restore(1, loader.load(lender.lend(state)).wait(20))
        forms = form_of(model, lender.cache), form_of(model, loader.cache)
        before = cells.read(forms[0], state.tobytes())
        after = cells.read(
            replace(forms[1], stream=1 if loader.cache.streams > 1 else 0), restored.save(1).tobytes()
        )
    assert before.keys() == after.keys()
    assert {side for side, _ in before} >= ({"r"} if model == "lfm2" else {"r", "s"})
    step = {F32: 2**-24, F16: 2**-11, BF16: 2**-8}[here]
    for (side, place), bits in before.items():
        if side in "rs" or there == here:
            assert after[side, place] == bits, (side, place)
        else:
            number = cells.number(KINDS[there], bits)
            assert abs(cells.number(KINDS[here], after[side, place]) - number) <= step * abs(number) + 2**-24


def test_quantized_keys_beside_states(made: Made) -> None:
    with (
        running(made, "lfm2", kind=Q8_0, flash=True) as (prefill, saved),
        running(made, "lfm2", kind=Q8_0, flash=True) as (decode, restored),
        SequenceAgent(cache_of(prefill, saved), 128) as lender,
        SequenceAgent(cache_of(decode, restored), 128) as loader,
    ):
        alone = tokens_of(decode)
        prefill.compute(BEGIN, 0)
        restored.restore(1, loader.load(lender.lend(saved.save(0))).wait(20))
        assert decode.go_on(LAST, len(BEGIN), TOKENS, 1) == alone


@pytest.mark.parametrize("model", models.MODELS)
def test_a_whole_prompt_goes_on_with_the_first_token_of_the_answer(made: Made, model: str) -> None:
    with (
        running(made, model) as (prefill, saved),
        running(made, model) as (decode, restored),
        SequenceAgent(cache_of(prefill, saved), 128) as lender,
        SequenceAgent(cache_of(decode, restored), 128) as loader,
    ):
        alone = tokens_of(decode)
        prefill.compute(BEGIN, 0)
        first = prefill.compute([LAST], len(BEGIN))
        params = lender.lend(saved.save(0))
        with pytest.raises(InvalidError, match="tokens is 69; allowed: remote_num_tokens, which is 70, as the"):
            loader.load(params, len(BEGIN))
        restored.restore(1, loader.load(params).wait(20))
        assert [first, *decode.go_on(first, len(PROMPT), TOKENS - 1, 1)] == alone


@pytest.mark.parametrize("model", models.MODELS)
def test_what_a_context_keeps(made: Made, model: str) -> None:
    layers = models.MODELS[model].layers
    with running(made, model) as (engine, context):
        cache = cache_of(engine, context)
        assert cache.states == States(layers.count("s"), len(layers), *models.MODELS[model].sizes)
        assert cache.layers == layers.count("a")
        with pytest.raises(InvalidError, match="no cells; allowed: one token or more"):
            context.cache(context.save(0))
        state, _ = cache.make(3)
        with pytest.raises(LimitError, match="does not take a state"):
            context.restore(0, state[:-4])


def test_a_model_with_other_states_is_refused(made: Made) -> None:
    with (
        running(made, "jamba") as (prefill, saved),
        running(made, "lfm2") as (decode, restored),
        SequenceAgent(cache_of(prefill, saved), 128) as lender,
        SequenceAgent(cache_of(decode, restored), 128) as loader,
    ):
        prefill.compute(BEGIN, 0)
        state = saved.save(0)
        with pytest.raises(KvferryError):
            loader.load(lender.lend(state), deadline=5).wait(20)
        with pytest.raises(KvferryError):
            loader.lend(state)


@pytest.mark.parametrize("model", models.MODELS)
def test_a_server_goes_on_with_what_another_slot_has_computed(
    made: Made, model: str, tmp_path: pathlib.Path
) -> None:
    """A slot that was restored computes the one token of the prompt that its state does not have."""
    server = Running(made[1][model], tmp_path)
    try:
        alone, computed = server.complete(PROMPT, 0)
        assert computed == len(PROMPT)
        server.complete(BEGIN, 1, 1)
        saved = server.slots.save(1)
        assert saved.tokens.tolist() == BEGIN
        cache = SequenceCache.of_state(saved.state, 1, False)
        with SequenceAgent(cache, 256) as lender, SequenceAgent(cache, 256) as loader:
            state = loader.load(lender.lend(saved.state), len(BEGIN)).wait(20)
        server.complete(PROMPT[20:60], 0, 1)
        server.slots.restore(0, BEGIN, state, saved.version)
        assert server.complete(PROMPT, 0) == (alone, 1)

        # A control: with empty states other tokens come out.
        layers = cache.read(state)
        for layer in cache.recurrent:
            layers[layer].keys[...], layers[layer].values[...] = 0, 0
        server.slots.restore(1, BEGIN, state, saved.version)
        wrong, computed = server.complete(PROMPT, 1)
        assert computed == 1 and wrong != alone
    finally:
        server.process.communicate(timeout=60)
