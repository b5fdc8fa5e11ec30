"""The parts of the `speculators` library that are used here.

The library imports `datasets`, for its own data pipeline only, which brings most of its 313 MB. If that is not
installed, an empty module stands in during the import; then the library needs only `hs-connectors`, `loguru`,
`pydantic` and `openai` beyond this package's own dependencies.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from loguru import logger


@contextmanager
def standing_in(name: str, attributes: tuple[str, ...]) -> Iterator[None]:
    """Inside, `import name` gives an empty module if it is not installed. Its attributes are None: imported by the
    library, but never used."""
    if importlib.util.find_spec(name) is not None:
        yield
        return
    module = ModuleType(name)
    for attribute in attributes:
        setattr(module, attribute, None)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


with standing_in("datasets", ("Dataset", "concatenate_datasets", "load_dataset", "load_from_disk")):
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.models.mtp.config import MTPSpeculatorConfig
    from speculators.models.mtp.core import MTPDraftModel, compute_step_weights
    from speculators.models.peagle.core import PEagleDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.data import CollateFn
    from speculators.train.utils import normalize_counted_metrics
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

logger.disable("speculators")  # it would print its own log lines

__all__ = [
    "CollateFn",
    "DFlashDraftModel",
    "Eagle3DraftModel",
    "GreedyTokenProposalConfig",
    "MTPDraftModel",
    "MTPSpeculatorConfig",
    "PEagleDraftModel",
    "SpeculatorsConfig",
    "VerifierConfig",
    "build_vocab_mappings_from_distribution",
    "compute_step_weights",
    "normalize_counted_metrics",
    "resolve_loss_config",
    "shift_batch",
]
