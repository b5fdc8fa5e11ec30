"""Certificates of encoders: on this machine an image's embeddings have the same bits at another number of threads.

The first image is the check's data, so users without images need not wait: it is encoded twice, and used if both
results agree. The certificate is then stored on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftproof.engine.items import Encoder
from draftproof.models import image_encoder
from draftproof.models.vision import Vision
from draftproof.runtime import environment, native
from draftproof.runtime.store import Store
from draftproof.runtime.threads import threads


class CertifiedEncoder:
    """An encoder whose embeddings are used only once their bits are shown not to depend on the number of threads."""

    def __init__(self, inner: Encoder, name: str, *, cache_dir: Path | None = None) -> None:
        """name: what the certificate holds for, beside the machine; see `name_of`."""
        self.inner = inner
        self._name = name
        self._is_certified = False
        self._folder = cache_dir or native.default_cache_dir()

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The embeddings of one item. RuntimeError if bits differ in the first call's check."""
        found = self.inner(tensors)
        if not self._is_certified:
            self._certify(tensors, found)
            self._is_certified = True
        return found

    def _certify(self, tensors: Mapping[str, Tensor], found: Tensor) -> None:
        count = torch.get_num_threads()
        store = Store(self._folder / f"encoders-{environment.key(torch.device('cpu'), None)}.json")
        if store.read().get(self._name) is True:
            return
        other = 1 if count > 1 else 2
        with threads(other):
            again = self.inner(tensors)
        if not torch.equal(found.contiguous().view(torch.uint8), again.contiguous().view(torch.uint8)):
            raise RuntimeError(
                f"the image encoder gives other embeddings at {other} than at {count} threads on this machine, so "
                "answers about images could not be repeated; set exact=False to have them nevertheless"
            )
        store.add({self._name: True})


def name_of(vision: Vision, dtype: torch.dtype) -> str:
    """The encoder's part of a certificate's key: its config, and the versions of the code that computes it."""
    import transformers

    code = Path(image_encoder.__file__).read_bytes()
    facts = json.dumps(vision.config.get("vision_config"), sort_keys=True, default=str).encode()
    digest = hashlib.sha256(facts + code).hexdigest()[:20]
    return f"{vision.family.model_type} {dtype} transformers {transformers.__version__} {digest}"
