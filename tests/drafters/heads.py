"""Builds a draft head from a checkpoint folder beside its target, and feeds it rows with teacher-forced tokens.

Shapes: T target rows, N draft rows, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.cache.pool import PagedKV
from draftproof.checkpoints import detect, in_target
from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.drafters import registry
from draftproof.drafters.base import DraftRuntime
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import DraftHead, HeadDrafter
from draftproof.drafters.modules import ModulesDrafter
from draftproof.kernels import ops
from draftproof.matmul.linear import LinearPlanner
from draftproof.models.builder import LayerBuilder
from draftproof.models.config import read_config
from draftproof.models.decoder import Decoder
from draftproof.models.weights import Weights
from draftproof.runtime.graphs import EAGER
from draftproof.runtime.native import Library
from tests.helpers import CPU, Paged, run_rows

ORACLE = Path(__file__).parent.parent / "data" / "oracle"


class Pair:
    """A target and a head for it; `library` None: torch operators."""

    head: DraftHead

    def __init__(
        self,
        folder: str,
        target: str,
        reference: Path | None = None,
        num_drafts: int = 5,
        options: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
        library: Library | None = None,
        double: Callable[[Path], Weights] | None = None,
    ) -> None:
        """`reference`: the folder of inputs and outputs if it is not the head's. A head in its target's folder is part
        of the target. `dtype`, `fp8`: of the head. `double`: reads a folder's weights, for a pair in fp64, which is
        made and run inside `Double`."""
        directory = ORACLE / target
        planner = LinearPlanner(CPU, exact=True, max_rows=256, library=library)
        self.ops, self.library = ops.select(CPU, library), library
        self.dtype = torch.float64 if double else torch.float32
        dtype = torch.float64 if double else dtype
        weights = double(directory) if double else Weights.open(directory)
        self.target = Decoder.load(weights, read_config(directory), self.ops, planner, CPU, self.dtype)
        own = double(ORACLE / folder) if double else None
        checkpoint = in_target.read(directory) if folder == target else detect.read(ORACLE / folder, own)
        ctx = DraftContext(
            config=EngineConfig(),
            own=SpeculativeConfig(),
            options=options or {},
            num_drafts=num_drafts,
            checkpoint=checkpoint,
            target=self.target,
            target_weights=weights,
            target_directory=directory,
            builder=LayerBuilder(
                checkpoint.weights, self.ops, planner, CPU, dtype, exact=False, kind="fp8" if fp8 else "dense"
            ),
            max_model_len=256,
            max_positions=256,
        )
        before = planner.weight_bytes
        drafter = registry.build(checkpoint.method, ctx)
        self.num_bytes = planner.weight_bytes - before  # bytes of the head's own weights
        planner.certify()
        assert isinstance(drafter, (HeadDrafter, ModulesDrafter))
        self.drafter = drafter
        if isinstance(drafter, HeadDrafter):
            self.head = drafter.head
        self.io: dict[str, Tensor] = load_file((reference or ORACLE / folder) / "oracle_io.safetensors")
        self.tokens: list[int] = self.io["input_ids_raw"].tolist()

    def taps(self) -> tuple[Tensor, ...]:
        """The tapped states that the head declares, over the whole oracle text."""
        spec = self.drafter.spec.taps
        out = run_rows(self.target, Paged(self.target.kv), [(0, 0, self.tokens)], spec.layers, spec.final)
        return out.taps

    def memory(self, num_slots: int = 1) -> Paged:
        paged = self.paged(self.drafter.spec.kv, num_slots=num_slots)
        paged.cache.states += [s.allocate(num_slots, self.dtype, CPU) for s in self.drafter.spec.states]
        return paged

    def paged(self, kv: Sequence[PagedKV], **settings: Any) -> Paged:
        """A cache for the operators and the dtype of the pair."""
        return Paged(kv, dtype=self.dtype, library=self.library, **settings)

    def run(
        self, paged: Paged, tokens: list[int], features: Tensor | None, positions: list[int], slots: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """One pass of the head: (hidden, feedback) of all rows."""
        attn: PagedAttention = paged.attention(torch.tensor(positions), torch.tensor(slots))
        return self.head(torch.tensor(tokens), features, attn)

    def bind(self, paged: Paged) -> None:
        self.drafter.bind(DraftRuntime(ops=self.ops, backend=paged.backend, cache=paged.cache, graphs=EAGER))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> Any:
    """Assert that the largest difference is within `tolerance`; returns it."""
    difference = (actual - expected).abs().max().item()
    assert actual.shape == expected.shape and difference <= tolerance, difference
    return difference
