"""Which layers are a draft model's, and how layers are numbered.

Speculative decoding may run a draft model beside the model (EAGLE, MTP, a small model). vLLM puts layers of
both into one group if their caches are alike. kvferry has groups of their own for the draft's layers, so that
an engine with a draft model and one without have the same other groups, which can be moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer belongs.

    Attributes:
        number: among all layers of the engine; a draft's follow the model's own
        index: its number in the configuration of its model
        model: the configuration of its model
        draft: whether that is the draft model
    """

    number: int
    index: int
    model: ModelConfig
    draft: bool = False


def layer_index(name: str) -> int:
    """The number in a layer's name."""
    numbers = [int(word) for word in name.split(".") if word.isdecimal()]
    if len(numbers) != 1:
        raise UnsupportedError(f"layer {name} has {len(numbers)} numbers in its name; allowed: 1")
    return numbers[0]


def place_layer(config: VllmConfig, name: str) -> LayerPlace:
    """Finds out where a layer belongs.

    vLLM numbers the layers of EAGLE's drafts and of most MTP modules after the model's own. The layers of other
    drafts begin at 0 again, with another prefix in their names. A small model's always have that prefix, and so
    a model beside one may have more layers than its configuration says: of each pass through a loop.
    """
    number, speculative = layer_index(name), config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    if draft is None:
        return LayerPlace(number, number, config.model_config)
    own = config.model_config.model_arch_config.total_num_hidden_layers
    words = name.split(".")
    if "draft_model" in words or ("mtp" in words and number < own):
        return LayerPlace(own + number, number, draft, draft=True)
    if number >= own and not speculative.uses_draft_model():
        return LayerPlace(number, number - own, draft, draft=True)
    return LayerPlace(number, number, config.model_config)
