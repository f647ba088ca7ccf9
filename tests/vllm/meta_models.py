"""Small models of vLLM without weights (on torch's meta device), whose layers say what they keep.

They are built in a process of their own, so that no other test sees what stands in there for kernels and for
packages that only a GPU or an image needs. vLLM's classes compute what they keep from a configuration; none of
that is replaced.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

LAYERS = 3
#: Fields that most families have. No two sizes are equal.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
EXPERTS = {
    "num_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
LATENT = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 14,
    "v_head_dim": 18,
    "q_lora_rank": 30,
}


@dataclass
class Wanted:
    """A model that is to be built."""

    config: dict[str, Any]
    model_class: str | None = None  #: "module:class", where vLLM's registry has none for the architecture
    device: str = "meta"
    block_size: int = 32
    attributes: tuple[str, ...] = ()  #: of layers, which are told beside their specifications


@dataclass
class Layer:
    """What a layer of vLLM says of itself."""

    spec: Any
    attributes: dict[str, Any] = field(default_factory=dict)


def config_of(family: str, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration of these fields and of SIZES; null: the family has no such field."""
    both = {**SIZES, **fields}
    known = {key: value for key, value in both.items() if value is not None or key == "head_dim"}
    kind = {"architectures": [architecture], "model_type": family, "torch_dtype": "float16"}
    return copy.deepcopy({**kind, **known})


def read_model(config: dict[str, Any]) -> Any:
    """What kvferry reads; a field that it warns of is an error."""
    import kvferry

    with warnings.catch_warnings():
        warnings.simplefilter("error", kvferry.ConfigWarning)
        return kvferry.Model.from_config(config)


def layers_of(models: dict[str, Wanted]) -> dict[str, dict[str, Layer] | str]:
    """The layers of each model that keep something, by vLLM's names; or why the model could not be built."""
    program = "import sys, meta_models; meta_models.build_all(sys.argv[1])"
    folder = pathlib.Path(__file__).parent
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory() as place:
        answer = pathlib.Path(place) / "answer"
        done = subprocess.run(
            [sys.executable, "-c", program, str(answer)],
            cwd=folder,
            env=environment,
            input=pickle.dumps(models),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise RuntimeError(done.stdout.decode(errors="replace"))
        found: dict[str, dict[str, Layer] | str] = pickle.loads(answer.read_bytes())
        return found


# ---- in the process of its own: what stands in for a GPU ---------------------------------------------

ABSENT = ("torchvision", "flashinfer", "cutlass", "vllm.vllm_flash_attn", "vllm.third_party.deep_gemm")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages and all of their modules, which do nothing."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not any(name == package or name.startswith(package + ".") for package in ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return unittest.mock.MagicMock(name=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def maker(kind: type) -> Callable[..., Any]:
    """Makes objects that pass for kernels of this class and compute nothing."""

    def make(*_: Any, **__: Any) -> Any:
        kernels = unittest.mock.MagicMock(
            dcp_world_size=1, supports_quant_query_input=False, kv_sharing_target_layer_name=None
        )
        kernels.__class__ = kind
        return kernels

    return make


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """vLLM believes that there is a GPU, and chooses backends without kernels."""
    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.triton_utils import tl
    from vllm.v1.attention.backends import fa_utils

    with contextlib.ExitStack() as patches:

        def patch(*which: Any, **how: Any) -> None:
            patches.enter_context(unittest.mock.patch.object(*which, **how))

        sys.meta_path.insert(0, Absent())  # after transformers has seen which of its packages are there
        patches.callback(sys.meta_path.pop, 0)
        for name in ("flash_attn_varlen_func", "get_scheduler_metadata", "reshape_and_cache_flash"):
            patch(fa_utils, name, create=True)
        patch(fa_utils, "compile_flash_attn_varlen_func_from_specs", None, create=True)
        patch(fa_utils, "is_flash_attn_varlen_func_available", lambda: True)
        from vllm.v1.attention.backends.flashinfer import FlashInferBackend
        from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
        from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

        def backend_of(_selected: Any, attn_selector_config: Any, **_: Any) -> str:
            latent = FlashMLASparseBackend if attn_selector_config.use_sparse else FlashMLABackend
            kind = latent if attn_selector_config.use_mla else FlashInferBackend
            return f"{kind.__module__}.{kind.__qualname__}"

        patch(current_platform, "get_attn_backend_cls", backend_of)
        patch(current_platform, "get_mla_prefill_backend_cls", lambda _: unittest.mock.MagicMock())
        patch(current_platform, "get_device_capability", lambda *_: DeviceCapability(9, 0))
        for kind in (FlashInferBackend, FlashMLABackend, FlashMLASparseBackend):
            make = maker(kind.get_impl_cls())
            patch(kind, "get_impl_cls", lambda make=make: make)
        patch(FlashInferBackend, "supports_alibi_sqrt", lambda: True)
        patch(VllmConfig, "_validate_v1_model_runner", lambda _: None)
        patch(tl, "extra", create=True)
        patch(torch.ops._C, "gelu_quick", create=True)  # of vLLM's extension, which its files alone have not
        patch(torch.cuda, "Stream")
        patch(torch.cuda, "Event")
        patch(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        properties = unittest.mock.MagicMock(multi_processor_count=132)
        patch(torch.cuda, "get_device_properties", lambda *_: properties)
        patch(torch.accelerator, "current_device_index", lambda: 0)
        # vLLM would look at each class in yet another process, which takes long and has no stand-ins.
        patch(
            _LazyRegisteredModel,
            "inspect_model_cls",
            lambda self: _ModelInfo.from_model_cls(self.load_model_cls()),
        )
        yield


# ---- in the process of its own: the models ------------------------------------------------------------


class Attribute(dict[str, Any]):
    """An object whose fields are attributes, as the classes of published configurations make them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def register(family: str) -> None:
    """Makes transformers know a family that neither it nor vLLM has a class for."""
    from transformers import AutoConfig, PreTrainedConfig, Qwen2Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    class Plain(PreTrainedConfig):
        """For families whose class comes with their checkpoints: fields as they are in the file."""

        def __post_init__(self, **fields: Any) -> None:
            blocks = fields.pop("block_configs", None)
            super().__post_init__(**fields)
            if "num_layers" in fields:
                self.num_hidden_layers = fields["num_layers"]
            if blocks:
                self.block_configs = [
                    Attribute({name: Attribute(part) for name, part in one.items()}) for one in blocks
                ]

    if family not in CONFIG_MAPPING and family not in _CONFIG_REGISTRY:
        base = Qwen2Config if family == "mimo" else Plain
        AutoConfig.register(family, type(family, (base,), {"model_type": family}))


def vllm_config(wanted: Wanted) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig

    register(wanted.config["model_type"])
    text = wanted.config.get("text_config", wanted.config)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(wanted.config))
        model = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype=text["torch_dtype"],
            max_model_len=64,
            enforce_eager=True,
        )
    # As vLLM's server does: otherwise a window is that of all layers.
    window = None if "layer_types" in text else model.get_sliding_window()
    cache = CacheConfig(block_size=wanted.block_size, sliding_window=window, enable_prefix_caching=False)
    whole = VllmConfig(model_config=model, cache_config=cache, device_config=DeviceConfig(device="cpu"))
    cache.block_size = wanted.block_size  # which the platform may have changed, for its kernels
    if getattr(whole, "engram_config", None):
        whole.engram_config.cpu_offload = False  # pinned memory is a GPU's
    return whole


def build(wanted: Wanted) -> dict[str, Layer]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.utils.torch_utils import set_default_torch_dtype

    if wanted.model_class:
        ModelRegistry.register_model(wanted.config["architectures"][0], wanted.model_class)
    whole = vllm_config(wanted)
    with set_current_vllm_config(whole), tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        try:
            parallel_state.initialize_model_parallel(1, 1)
            with torch.device(wanted.device), set_default_torch_dtype(whole.model_config.dtype):
                initialize_model(whole, prefix="")
            found = {}
            for name, layer in whole.compilation_config.static_forward_context.items():
                spec = layer.get_kv_cache_spec(whole) if hasattr(layer, "get_kv_cache_spec") else None
                told = {one: getattr(layer, one) for one in wanted.attributes if hasattr(layer, one)}
                if spec:
                    found[name] = Layer(spec, told)
            return found
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def build_all(answer: str) -> None:
    models: dict[str, Wanted] = pickle.loads(sys.stdin.buffer.read())
    found: dict[str, dict[str, Layer] | str] = {}
    with without_gpu():
        for name, wanted in models.items():
            try:
                found[name] = build(wanted)
            except Exception:
                found[name] = traceback.format_exc()
    pathlib.Path(answer).write_bytes(pickle.dumps(found))
