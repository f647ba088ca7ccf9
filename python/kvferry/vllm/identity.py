"""What two engines must agree on beyond their caches: the weights, and what a kept answer is the cache of.

Caches of other weights have the same shapes and other content, which no check of shapes would notice. So an
engine may name its weights, and engines with other weights are refused.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvferry.errors import InvalidError, MismatchError
from kvferry.vllm.geometry import RankGeometry

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.request import Request

#: The setting by which the weights are identified from the files of the checkpoint.
CHECKPOINT = "checkpoint"
SAMPLE_BYTES = 64
LONGEST_HEADER = 100 << 20


def weights_of(setting: str, model: str) -> str:
    """The identity of the weights: the operator's setting, or that of the checkpoint; "": none is asked for.

    Args:
        model: where the checkpoint is

    Raises InvalidError: there are no safetensors files, or one of them is not such a file.
    """
    if setting != CHECKPOINT:
        return setting
    files = sorted(pathlib.Path(model).glob("*.safetensors"))
    if not files:
        raise InvalidError(
            f"weights is {CHECKPOINT!r}, but {model} is not a folder with safetensors files; "
            "give the weights a name"
        )
    tensors = sorted(tensor for file in files for tensor in _tensors(file))
    return hashlib.sha256(repr(tensors).encode()).hexdigest()[:32]


def scale_facts(ranks: Iterable[RankGeometry]) -> dict[str, str]:
    """What other engines are told of the scales of caches in FP8: for each group that has any but 1, a digest.

    Scales are no part of the cache, so no check of its shape would notice that another engine has other ones.

    Raises MismatchError: ranks have different scales for one layer.
    """
    groups = [group for rank in ranks for group in rank.groups]
    scaled = {
        group.name
        for group in groups
        for held in group.layers
        if any(scale != 1 for scales in held.scales for scale in scales)
    }
    known: dict[str, dict[tuple[int, str, int], float]] = {}  # by layer, part and head
    for group in (group for group in groups if group.name in scaled):
        own, heads = known.setdefault(group.name, {}), group.shares[0].units
        for held in group.layers:
            for what, scales in zip("kv", held.scales, strict=True):
                for head, scale in zip(heads, scales * (len(heads) // len(scales)), strict=True):
                    said = own.setdefault((held.layer, what, head), scale)
                    if said != scale:
                        raise MismatchError(
                            f"layer {held.layer}: {what} of head {head} is scaled by {said} on one rank and by "
                            f"{scale} on another"
                        )
    return {
        f"{name}.scales": hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()[:32]
        for name, own in known.items()
    }


def _tensors(file: pathlib.Path) -> Iterator[tuple[str, str, str, bytes]]:
    """Name, element type, shape and a sample of each tensor: its first bytes, and those in its middle."""
    with file.open("rb") as content:
        try:
            size = int.from_bytes(content.read(8), "little")
            if not 2 <= size <= LONGEST_HEADER:
                raise ValueError(f"its header has {size} bytes; allowed: 2 to {LONGEST_HEADER}")
            header: dict[str, Any] = json.loads(content.read(size))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                if not 0 <= begin <= end:
                    raise ValueError(f"{name} is at {begin} to {end}")
                sample = b""
                for at in (begin, (begin + end) // 2):
                    content.seek(8 + size + at)
                    sample += content.read(min(SAMPLE_BYTES, end - at))
                yield name, str(tensor["dtype"]), str(tensor["shape"]), sample
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidError(f"{file} is not a safetensors file: {error}") from None


def rotation_of(config: ModelConfig) -> str:
    """A digest of how keys are rotated before they are cached; "": the configuration does not say.

    Servers may be started with other settings than the checkpoint's. And of LongRoPE's two lists of factors
    vLLM takes one for all tokens, by whether prompts may be longer than those of the first training.
    """
    text = config.hf_text_config
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        return ""
    original = getattr(text, "original_max_position_embeddings", None)
    original = parameters.get("original_max_position_embeddings", original)
    longer = "longrope" in str(parameters) and original is not None and config.max_model_len > original
    said = [parameters, getattr(text, "partial_rotary_factor", None), longer]
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def prompt_of(request: Request, tokens: int) -> str:
    """A digest of a request's first tokens and its adapter; "": it was given as embeddings.

    Servers whose templates or tokenizers differ make other tokens of the same text, perhaps as many.
    """
    return _digest(request, tokens, _adapter(request) or "")


def content_of(request: Request, tokens: int) -> str:
    """A digest of what the cache of a request's first tokens depends on, beside the weights; "": there is none.

    These are the token ids, the adapter, images and the like among these tokens, and the salt of its prefix
    cache. A prompt that was given as embeddings has no digest.
    """
    inputs = [(item.identifier, item.mm_position.offset) for item in request.mm_features]
    beside = [_adapter(request), request.cache_salt, [item for item in inputs if item[1] < tokens]]
    return _digest(request, tokens, json.dumps(beside))


def _adapter(request: Request) -> str | None:
    return request.lora_request.lora_name if request.lora_request is not None else None


def _digest(request: Request, tokens: int, beside: str) -> str:
    """A digest of a request's first tokens and a text; "": the prompt was given as embeddings."""
    if request.prompt_embeds is not None:
        return ""
    digest = hashlib.blake2b(array("q", request.all_token_ids[:tokens]).tobytes(), digest_size=16)
    digest.update(beside.encode())
    return digest.hexdigest()
