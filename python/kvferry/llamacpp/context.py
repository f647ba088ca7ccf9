"""A context of llama.cpp, by its C interface: what it caches, and the states of its sequences."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InvalidError, LimitError, NotFoundError, UnsupportedError
from kvferry.llamacpp.sections import State, bytes_of
from kvferry.llamacpp.state import SequenceCache

#: The functions that are used: their results and arguments.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_get_model": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_model_is_hybrid": (ctypes.c_bool, [ctypes.c_void_p]),
    "llama_model_is_recurrent": (ctypes.c_bool, [ctypes.c_void_p]),
    "llama_model_n_head_kv": (ctypes.c_int32, [ctypes.c_void_p]),
    "llama_model_n_layer": (ctypes.c_int32, [ctypes.c_void_p]),
    "llama_model_n_swa": (ctypes.c_int32, [ctypes.c_void_p]),
    "llama_model_rope_type": (ctypes.c_int, [ctypes.c_void_p]),
    "llama_model_meta_val_str": (
        ctypes.c_int32,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t],
    ),
    "llama_state_seq_get_size": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int32]),
    "llama_state_seq_get_data": (
        ctypes.c_size_t,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32],
    ),
    "llama_state_seq_set_data": (
        ctypes.c_size_t,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32],
    ),
}


class RopeType(enum.IntEnum):
    """Which elements rotary embedding turns together, as llama_model_rope_type() says; there are others."""

    NONE = -1
    NORM = 0  # neighbours
    NEOX = 2  # those half a head apart


#: Architectures of type NORM whose checkpoints have the elements half a head apart: llama.cpp's converter
#: reorders the rows of queries and keys. Source: llama.cpp's conversion/, where it permutes k_proj.
INTERLEAVED = frozenset(
    {
        "arcee",
        "arctic",
        "deci",
        "granite",
        "granitemoe",
        "internlm2",
        "llama",
        "minicpm",
        "mistral3",
        "nanbeige",
        "olmo",
        "smollm3",
    }
)
#: Architectures of type NORM whose checkpoints have neighbours together, too, so that nothing is reordered.
NOT_INTERLEAVED = frozenset({"command-r", "deepseek2", "ernie4_5", "glm4"})


def interleaves(architecture: str, rope_type: int) -> bool:
    """Whether the halves of keys are interleaved in llama.cpp, and not in engines that read the checkpoint.

    Args:
        architecture: general.architecture of the GGUF file
        rope_type: a RopeType, or another number that llama_model_rope_type() has given

    Raises UnsupportedError: it is not known.
    """
    if rope_type in (RopeType.NONE, RopeType.NEOX):
        return False
    if rope_type == RopeType.NORM and architecture in INTERLEAVED | NOT_INTERLEAVED:
        return architecture in INTERLEAVED
    raise UnsupportedError(
        f"the order of keys is not known for the architecture {architecture} with rotary embedding of type "
        f"{rope_type}; allowed: type {RopeType.NEOX} or {RopeType.NONE}, or type {RopeType.NORM} with one of "
        f"{', '.join(sorted(INTERLEAVED | NOT_INTERLEAVED))}, or `interleaved` given by the caller"
    )


#: Of architectures in which every so many layers one has no sliding window, the last of them: how many. Source:
#: llama.cpp's src/models/, where it calls load_swa_pattern().
PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2}


def windowed_layers(architecture: str, layers: int, said: str | None = None) -> tuple[int, ...]:
    """Which layers of a model have a sliding window.

    Args:
        architecture: general.architecture of the GGUF file
        layers: how many the model has
        said: attention.sliding_window_pattern there, a number of layers, of which the last has no window; None:
            nothing, or a list of layers, which llama.cpp does not tell

    Raises UnsupportedError: it is not known.
    """
    if said is not None and not said.isdecimal():
        raise UnsupportedError(
            f"attention.sliding_window_pattern is {said!r}; allowed: a number of layers, of which the last has "
            "no window, or `windowed` given by the caller"
        )
    if said is None and architecture not in PERIODS:
        raise UnsupportedError(
            f"the layers with a sliding window are not known for the architecture {architecture}; allowed: "
            f"{', '.join(sorted(PERIODS))}, or `windowed` given by the caller"
        )
    period = int(said) if said is not None else PERIODS[architecture]
    return tuple(layer for layer in range(layers) if period == 0 or layer % period < period - 1)


class Context:
    """A llama_context that belongs to the caller. Like it, not safe to use from several threads at once.

    Args:
        library: llama.cpp, loaded; or its file, which must be the one that made the context
        pointer: of the context: its address, or a pointer of ctypes

    Raises NotFoundError: the library has not all functions that are needed, see FUNCTIONS.
    """

    def __init__(self, library: ctypes.CDLL | str, pointer: Any) -> None:
        loaded = ctypes.CDLL(library) if isinstance(library, str) else library
        lacking = [name for name in FUNCTIONS if not hasattr(loaded, name)]
        if lacking:
            raise NotFoundError(
                f"{loaded._name} is not a llama.cpp that can be used: it has no {', '.join(lacking)}"
            )
        # Functions of our own: the caller may have given those of its library other types.
        self._functions = {
            name: ctypes.CFUNCTYPE(result, *arguments)((name, loaded))
            for name, (result, arguments) in FUNCTIONS.items()
        }
        self._pointer = ctypes.cast(pointer, ctypes.c_void_p)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._functions[name](*arguments)

    def cache(
        self,
        state: State,
        interleaved: bool | None = None,
        windowed: Sequence[int] | None = None,
    ) -> SequenceCache:
        """How this context keeps the cache of a sequence.

        Args:
            state: any that save() has given, of one token or more
            interleaved: see SequenceCache; None: as interleaves() says for the model's architecture
            windowed: the layers with a sliding window, of a model that has any. None: as the model's file says,
                or windowed_layers() for its architecture

        Raises InvalidError, UnsupportedError: see SequenceCache.of_state(), interleaves(),
        windowed_layers().
        """
        model = self._call("llama_get_model", self._pointer)
        architecture = self._said(model, "general.architecture") or "that is not named"
        heads = self._call("llama_model_n_head_kv", model)
        if any(self._call(f"llama_model_is_{kind}", model) for kind in ("recurrent", "hybrid")):
            heads, interleaved = 1, False  # see SequenceCache.states
        elif interleaved is None:
            interleaved = interleaves(architecture, self._call("llama_model_rope_type", model))
        window = self._call("llama_model_n_swa", model)
        if not window:
            windowed = ()
        elif windowed is None:
            said = self._said(model, f"{architecture}.attention.sliding_window_pattern")
            windowed = windowed_layers(architecture, self._call("llama_model_n_layer", model), said)
        return SequenceCache.of_state(state, heads, interleaved, windowed, window)

    def _said(self, model: Any, key: str) -> str | None:
        """What the model's file says, as llama.cpp writes it; None: nothing."""
        text = ctypes.create_string_buffer(256)
        length = self._call("llama_model_meta_val_str", model, key.encode(), text, len(text))
        return text.value.decode() if length >= 0 else None

    def save(self, sequence: int) -> NDArray[np.uint8]:
        """The state of a sequence, copied. Raises InvalidError: llama.cpp gives none; its log says why."""
        size = self._call("llama_state_seq_get_size", self._pointer, sequence)
        state = np.empty(size, np.uint8)
        written = self._call("llama_state_seq_get_data", self._pointer, state.ctypes.data, size, sequence)
        if not written or written != size:
            raise InvalidError(f"llama.cpp gives {written} of {size} bytes of sequence {sequence}")
        return state

    def restore(self, sequence: int, state: State) -> None:
        """Replaces a sequence by a state, which is copied.

        Raises LimitError: llama.cpp does not take it, mostly because too few cells are free; its log says why.
        The sequence is empty then.
        """
        content = bytes_of(state)
        if not self._call(
            "llama_state_seq_set_data", self._pointer, content.ctypes.data, content.nbytes, sequence
        ):
            raise LimitError(
                f"llama.cpp does not take a state of {content.nbytes} bytes for sequence {sequence}: too few "
                "cells are free, or it is of another cache"
            )
