"""llama.cpp by its C interface, as far as the tests need it: a model, a context, one token after the other."""

from __future__ import annotations

import ctypes
import pathlib
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

import xllamacpp

F32, F16, BF16, Q4_0, Q8_0 = 0, 1, 30, 2, 8
SEED = 0


class _ModelParams(ctypes.Structure):
    _fields_ = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc")),
        ("load_mtp", c_bool),
    ]


class _ContextParams(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_uint32)
            for name in (
                "n_ctx",
                "n_batch",
                "n_ubatch",
                "n_seq_max",
                "n_rs_seq",
                "n_outputs_max",
                "n_outputs_max_per_seq",
            )
        ),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        *((name, c_int) for name in ("ctx_type", "rope_scaling_type", "pooling_type", "attention_type")),
        ("flash_attn_type", c_int),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")),
        *((name, c_float) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full")),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


def load_library() -> ctypes.CDLL:
    """The library inside xllamacpp's extension module, which exports the whole interface."""
    (file,) = pathlib.Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(file))
    functions: dict[str, tuple[Any, list[Any]]] = {
        "llama_backend_init": (None, []),
        "llama_log_set": (None, [c_void_p, c_void_p]),
        "llama_model_default_params": (_ModelParams, []),
        "llama_context_default_params": (_ContextParams, []),
        "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParams]),
        "llama_init_from_model": (c_void_p, [c_void_p, _ContextParams]),
        "llama_free": (None, [c_void_p]),
        "llama_model_free": (None, [c_void_p]),
        "llama_decode": (c_int32, [c_void_p, _Batch]),
        "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
        "llama_get_memory": (c_void_p, [c_void_p]),
        "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    defaults = library.llama_context_default_params()
    found = defaults.n_ctx, defaults.n_batch, defaults.type_k, defaults.type_v, defaults.n_samplers
    if found != (512, 2048, F16, F16, 0):
        raise RuntimeError(f"llama_context_params have other fields than these tests know: {found}")
    library.llama_log_set(_LOG, None)
    library.llama_backend_init()
    return library


#: What llama.cpp has logged.
said: list[str] = []


def _note(level: int, text: bytes, _: Any) -> None:
    said.append(text.decode(errors="replace").rstrip())


_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(_note)


class Llama:
    """A model and a context.

    Args:
        flash: with flash attention; without, values lie channel by channel
        kind: ggml's type of keys and values
        unified: sequences share the context's cells
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        file: pathlib.Path,
        vocabulary: int,
        *,
        flash: bool = False,
        kind: int = F32,
        sequences: int = 4,
        unified: bool = True,
        cells: int = 1024,
    ) -> None:
        self._library, self._vocabulary = library, vocabulary
        params = library.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file}: {said[-5:]}")
        context = library.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = cells, cells, cells
        context.n_seq_max, context.kv_unified = sequences, unified
        context.n_threads = context.n_threads_batch = 1
        context.flash_attn_type, context.type_k, context.type_v = int(flash), kind, kind
        context.offload_kqv = context.op_offload = False
        self.context = library.llama_init_from_model(self._model, context)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context: {said[-5:]}")

    def close(self) -> None:
        """Frees both."""
        self._library.llama_free(self.context)
        self._library.llama_model_free(self._model)

    def compute(self, tokens: list[int], begin: int, sequence: int = 0) -> int:
        """Computes tokens at positions from `begin` on; returns the most likely next one."""
        count = len(tokens)
        sequence_of = (c_int32 * 1)(sequence)
        batch = _Batch(
            count,
            (c_int32 * count)(*tokens),
            None,
            (c_int32 * count)(*range(begin, begin + count)),
            (c_int32 * count)(*[1] * count),
            (POINTER(c_int32) * count)(*[ctypes.cast(sequence_of, POINTER(c_int32))] * count),
            (c_int8 * count)(*[i == count - 1 for i in range(count)]),
        )
        status = self._library.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode() returns {status}: {said[-5:]}")
        logits = self._library.llama_get_logits_ith(self.context, count - 1)
        return max(range(self._vocabulary), key=logits.__getitem__)

    def go_on(self, last: int, begin: int, count: int, sequence: int = 0) -> list[int]:
        """Computes a token at a position, and then one after the other; returns `count` new ones."""
        found: list[int] = []
        for position in range(begin, begin + count):
            last = self.compute([last], position, sequence)
            found.append(last)
        return found

    def forget(self, sequence: int) -> None:
        """Empties a sequence."""
        self._library.llama_memory_seq_rm(self._library.llama_get_memory(self.context), sequence, -1, -1)
