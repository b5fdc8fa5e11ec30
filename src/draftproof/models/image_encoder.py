"""Image encoders: transformers' modules. They run one image at a time, on one thread of a CPU, so that an image's
embeddings depend on nothing else.

Shapes: N rows of an image, X size of an embedding and of what is added to layers (`attention.given`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.models.vision import Vision
from draftproof.models.vision_families import Settings, Tensors
from draftproof.models.weights import WeightSource
from draftproof.runtime.threads import own_precision, threads


class ImageEncoder:
    """transformers' image encoder of a model, with its projection to the language model's width."""

    def __init__(
        self, vision: Vision, weights: WeightSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        """ValueError if the files lack one of its tensors, or have one of another shape."""
        self._module = _module(vision, dtype)
        self._inputs = vision.family.inputs
        self._device = device
        named = {**dict(self._module.named_parameters()), **_stored_buffers(self._module)}
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(
                    weights.get(_name_in(weights, name, vision.family.prefixes), tuple(tensor.shape))
                )
        self._module.to(device)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._module.parameters())

    def __call__(self, tensors: Tensors) -> Tensor:
        """The embeddings of one image, each followed by what is added to layers at its row, [N, X]; independent of
        torch's settings and of other work."""
        # copied, since libraries choose kernels by alignment, and other libraries' arrays have any
        given = {name: tensors[name].to(self._device, copy=True) for name in self._inputs}
        with torch.inference_mode(), threads(1), own_precision():
            found = self._module.get_image_features(**given)
            parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
            return torch.cat([_flat(part) for part in parts], dim=1)


def _flat(found: Tensor | Sequence[Tensor]) -> Tensor:
    """The rows of one image as one tensor; some encoders return several pieces."""
    pieces = [found] if isinstance(found, Tensor) else found
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])


# Config values of the smallest possible language model.
_STUMP: Settings = {
    **{"num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None, "intermediate_size": 8},
    **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False},
    **{"moe_intermediate_size": 8},
}


def _module(vision: Vision, dtype: torch.dtype) -> Any:
    """The model without its language model: that is built with minimal sizes and dropped."""
    from transformers import AutoConfig, AutoModel

    raw = {k: v for k, v in vision.config.items() if k not in ("quantization_config", "torch_dtype", "dtype")}
    config = AutoConfig.for_model(**raw)
    for key in vision.family.unmade:
        setattr(config, key, None)
    text = config.get_text_config()
    for key, least in _STUMP.items():
        if hasattr(text, key):
            setattr(text, key, least)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    module = AutoModel.from_config(config, dtype=dtype)
    del module.language_model
    return module.eval().requires_grad_(False)


def _stored_buffers(module: Any) -> dict[str, Tensor]:
    """Buffers that checkpoints store."""
    state = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in state}


def _name_in(weights: WeightSource, name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """The name of a module's tensor in the files."""
    names = (theirs + name.removeprefix(own) for own, theirs in prefixes if name.startswith(own))
    return next((each for each in names if each in weights), name)
