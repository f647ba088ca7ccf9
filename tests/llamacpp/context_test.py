"""llama.cpp itself: sequences that one context has computed go on in another, of another form."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cells
import gguf_models as models
import llama
import pytest
from gguf_models import PROMPT
from llama import BF16, F16, F32, Q4_0, Q8_0, Llama

from kvferry.errors import InvalidError, KvferryError, LimitError, NotFoundError, UnsupportedError
from kvferry.llamacpp import Context, SequenceAgent, SequenceCache, interleaves, windowed_layers

TOKENS = 16
KINDS = {F32: "f32", F16: "f16", BF16: "bf16"}
Made = tuple[ctypes.CDLL, dict[str, pathlib.Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """llama.cpp, and the files of the models."""
    folder = tmp_path_factory.mktemp("models")
    return llama.load_library(), {name: models.make(name, folder) for name in models.MODELS}


@contextmanager
def running(made: Made, model: str, **options: Any) -> Iterator[tuple[Llama, Context]]:
    library, files = made
    engine = Llama(library, files[model], models.VOCABULARY, **options)
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
    """The tokens that a context computes alone; as after a hand-over, the last one of the prompt in a step."""
    engine.compute(PROMPT[:-1], 0)
    found = engine.go_on(PROMPT[-1], len(PROMPT) - 1, TOKENS)
    engine.forget(0)
    return found


def form_of(cache: SequenceCache) -> cells.Form:
    return cells.Form(
        cache.layers,
        cache.kv_heads,
        cache.key_size,
        cache.value_size,
        cache.key_type.name.lower(),
        cache.value_type.name.lower(),
        cache.interleaved,
        cache.transposed,
        cache.streams,
        0,
        cache.rotations,
    )


def numbers(cache: SequenceCache, state: Any) -> dict[Any, float]:
    form = form_of(cache)
    return {
        place: cells.number(form.key_type if place[0] == "k" else form.value_type, bits)
        for place, bits in cells.read(form, bytes(state)).items()
    }


def spoil(cache: SequenceCache, state: Any) -> None:
    """Makes a state wrong, for equal tokens prove something only if a wrong cache gives different ones.

    Values get those of other tokens. Latents are keys, too, and the order of tokens does not count: they are
    cleared.
    """
    for layer in cache.read(state):
        if cache.latent:
            layer.keys[...] = 0
        layer.values[...] = layer.values[::-1].copy()


#: What differs from float32 without flash attention and with unified cells.
WAYS: tuple[dict[str, Any], ...] = ({}, {"flash": True}, {"unified": False})
#: Of the tiny Gemma, what flash attention has computed in float16 gives other tokens than what it has not.
ALIKE = [
    (model, there, here)
    for model, there, here in itertools.product(models.MODELS, WAYS, WAYS)
    if model != "gemma3" or ("flash" in there) == ("flash" in here)
]


@pytest.mark.parametrize(("model", "there", "here"), ALIKE, ids=str)
def test_a_prompt_goes_on_in_another_context(
    made: Made, model: str, there: dict[str, Any], here: dict[str, Any]
) -> None:
    with running(made, model, **there) as (prefill, saved), running(made, model, **here) as (decode, restored):
        alone = tokens_of(decode)

        with (
            SequenceAgent(cache_of(prefill, saved), 512, tokens_per_page=16) as lender,
            SequenceAgent(cache_of(decode, restored), 512, tokens_per_page=48) as loader,
        ):
            prefill.compute(PROMPT, 0)
            params = lender.lend(saved.save(0))
            prefill.forget(0)  # its copy was lent
            state = loader.load(params, len(PROMPT) - 1).wait(20)
        decode.compute(PROMPT[20:60], 0, 1)  # another sequence is in the context
        restored.restore(2, state)
        assert decode.go_on(PROMPT[-1], len(PROMPT) - 1, TOKENS, 2) == alone

        spoil(loader.cache, state)
        restored.restore(3, state)
        assert decode.go_on(PROMPT[-1], len(PROMPT) - 1, TOKENS, 3) != alone


@pytest.mark.parametrize("model", ("llama", "qwen3", "deepseek2"))
@pytest.mark.parametrize("there", (F32, F16, BF16), ids=KINDS.get)
@pytest.mark.parametrize("here", (F32, F16, BF16), ids=KINDS.get)
def test_cells_are_those_that_were_saved(made: Made, model: str, there: int, here: int) -> None:
    """What the other context then saves itself is compared number by number."""
    with (
        running(made, model, kind=there, flash=True) as (prefill, saved),
        running(made, model, kind=here, flash=True) as (decode, restored),
        SequenceAgent(cache_of(prefill, saved), 128) as lender,
        SequenceAgent(cache_of(decode, restored), 128) as loader,
    ):
        prefill.compute(PROMPT, 0)
        state = saved.save(0)
        restored.restore(1, loader.load(lender.lend(state)).wait(20))
        before, after = numbers(lender.cache, state), numbers(loader.cache, restored.save(1))
    assert before.keys() == after.keys()
    step = {F32: 2**-24, F16: 2**-11, BF16: 2**-8}[here]
    for place, value in before.items():
        exact = there in (here, F16, BF16) and here in (there, F32)
        assert abs(after[place] - value) <= (0 if exact else step * abs(value) + 2**-24), place


@pytest.mark.parametrize("kind", (Q8_0, Q4_0), ids=("q8_0", "q4_0"))
@pytest.mark.parametrize("model", ("llama", "llama.rotated", "qwen3", "gemma3", "deepseek2"))
def test_quantized_cells(made: Made, model: str, kind: int) -> None:
    with (
        running(made, model, kind=kind, flash=True) as (prefill, saved),
        running(made, model, kind=kind, flash=True, unified=False) as (decode, restored),
        SequenceAgent(cache_of(prefill, saved), 128) as lender,
        SequenceAgent(cache_of(decode, restored), 128) as loader,
    ):
        assert any(lender.cache.rotations or ()) == (model == "llama.rotated")
        alone = tokens_of(decode)
        prefill.compute(PROMPT, 0)
        state = saved.save(0)
        found = loader.load(lender.lend(state), len(PROMPT) - 1).wait(20)
        restored.restore(1, found)
        assert decode.go_on(PROMPT[-1], len(PROMPT) - 1, TOKENS, 1) == alone
        spoil(loader.cache, found)
        restored.restore(2, found)
        assert decode.go_on(PROMPT[-1], len(PROMPT) - 1, TOKENS, 2) != alone

        with (
            running(made, model, kind=F16, flash=True) as (other, plain),
            SequenceAgent(cache_of(other, plain), 128) as stranger,
            pytest.raises(KvferryError, match="quantized"),
        ):
            stranger.load(lender.lend(state), deadline=5).wait(20)


def test_cells_in_another_order(made: Made) -> None:
    """A context that was full has later tokens in front of earlier ones."""
    with (
        running(made, "llama", cells=128) as (engine, context),
        running(made, "llama") as (decode, restored),
        SequenceAgent(cache_of(engine, context), 128) as lender,
        SequenceAgent(cache_of(decode, restored), 128) as loader,
    ):
        engine.compute(PROMPT[:60], 0, 0)
        engine.compute(PROMPT[:60], 0, 1)
        engine.forget(0)
        engine.compute(PROMPT[60:], 60, 1)
        state = context.save(1)
        positions = [
            int.from_bytes(bytes(state[16 + 12 * i : 20 + 12 * i]), "little") for i in range(len(PROMPT))
        ]
        assert positions != sorted(positions)
        found = loader.load(lender.lend(state)).wait(20)
        assert cells.read(form_of(loader.cache), found.tobytes()) == cells.read(
            form_of(lender.cache), state.tobytes()
        )


def test_what_is_not_a_sequence_of_this_kind_is_refused(made: Made) -> None:
    with running(made, "llama") as (engine, context):
        with pytest.raises(InvalidError, match="no cells"):
            context.cache(context.save(0))
        cache = cache_of(engine, context)
        engine.compute(PROMPT[:5], 7)
        with pytest.raises(InvalidError, match="5 tokens of positions 7 to 11; allowed: each from 0 to 4 once"):
            cache.read(context.save(0))
        with pytest.raises(UnsupportedError):
            SequenceCache.of_state(context.save(0), 5, False)


def test_what_the_context_does_not_take_is_named(made: Made) -> None:
    with running(made, "llama", cells=256) as (engine, context):
        cache = cache_of(engine, context)
        state, layers = cache.make(300)
        for layer in layers:
            layer.keys[...], layer.values[...] = 0, 0
        with pytest.raises(LimitError, match=r"does not take a state of .* bytes for sequence 1: too few"):
            context.restore(1, state)
        engine.compute(PROMPT, 0)  # it is usable afterwards
    with running(made, "llama", flash=True) as (_, other), pytest.raises(LimitError):
        other.restore(0, cache.make(3)[0])


def test_a_library_must_be_llama_cpp(made: Made) -> None:
    with pytest.raises(NotFoundError, match=r"is not a llama\.cpp that can be used: it has no llama_get_model"):
        Context(ctypes.CDLL(None), 0)


def test_layers_with_a_window() -> None:
    assert windowed_layers("gemma3", 8) == (0, 1, 2, 3, 4, 6, 7)
    assert windowed_layers("gpt-oss", 4) == (0, 2)
    assert windowed_layers("gemma3", 6, "3") == (0, 1, 3, 4)
    assert windowed_layers("anything", 3, "1") == ()
    assert windowed_layers("anything", 3, "0") == (0, 1, 2)
    with pytest.raises(UnsupportedError, match="are not known for the architecture anything; allowed: cohere2"):
        windowed_layers("anything", 3)
    for said in ("true", "-1", "6.0", ""):
        with pytest.raises(UnsupportedError, match=r"_window_pattern is .*; allowed: a number"):
            windowed_layers("gemma3", 3, said)


def test_windows_of_other_layers_are_refused(made: Made) -> None:
    with running(made, "gemma3") as (engine, context):
        engine.compute(PROMPT, 0)
        state = context.save(0)
        assert context.cache(state).windowed == (0, 1, 3, 4)
        assert context.cache(state, windowed=(0, 1, 2, 3)).groups == ((0, 1, 2, 3), (4, 5))
        for windowed in ((), (0, 1, 3), (0, 1, 3, 4, 5)):
            with pytest.raises(UnsupportedError):
                context.cache(state, windowed=windowed)


def test_orders_of_keys() -> None:
    assert interleaves("llama", 0)
    assert not interleaves("qwen3", 2)
    assert not interleaves("llama", 2)
    assert not interleaves("glm4", 0)
    for architecture, kind in (("chatglm", 0), ("qwen2vl", 8)):
        with pytest.raises(UnsupportedError, match=f"is not known for the architecture {architecture} "):
            interleaves(architecture, kind)


def test_the_wrong_order_of_keys_is_noticed(made: Made) -> None:
    """A control: without the order that a Llama has in llama.cpp, other tokens come out."""
    with running(made, "llama") as (engine, context):
        first = engine.compute(PROMPT, 0)
        alone = [first, *engine.go_on(first, len(PROMPT), TOKENS - 1)]
        state = context.save(0)
        cache = context.cache(state)
        assert cache.interleaved
        plain = context.cache(state, interleaved=False)
        with SequenceAgent(cache, 128) as lender, SequenceAgent(plain, 128) as loader:
            context.restore(1, loader.load(lender.lend(state), len(PROMPT) - 1).wait(20))
        assert engine.go_on(PROMPT[-1], len(PROMPT) - 1, TOKENS, 1) != alone
