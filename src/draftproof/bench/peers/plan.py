"""Sets up and runs the comparison with other engines for a benchmark, and collects its results for the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftproof.bench.harness import Record
from draftproof.bench.peers import ENGINES, MEMORY, OURS
from draftproof.bench.peers.comparison import PROMPT_NEW, Comparison, Work
from draftproof.bench.peers.engine import Spec
from draftproof.bench.peers.processes import EngineFailedError, EngineProcess
from draftproof.models import cost
from draftproof.models.config import ModelConfig

LENGTH = 200  # ids of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line's settings for peers. `dtypes` empty: the engine's own; `num_threads` None: torch's number;
    `length`: ids of a prompt."""

    peers: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    num_threads: int | None = None
    busy: Sequence[int] = ()
    length: int = LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Results of a comparison, for results.json."""

    rows: list[Record] = field(default_factory=list)
    busy: list[Record] = field(default_factory=list)
    engines: Record = field(default_factory=dict)
    bytes_per_second: dict[str, float] = field(default_factory=dict)  # read, by dtype
    notes: list[str] = field(default_factory=list)


def weight_bytes(model: ModelConfig, dtype: str) -> float:
    """Bytes of weights that a step of one request reads."""
    size: int = getattr(torch, dtype).itemsize
    head = cost.products(model.vocab_size * model.hidden_size, 1, size)
    return (cost.layers_products(model, 1, size) + head).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The compared model. `settings`: other keywords of `LLM`; `dtype`: our engine's."""

    directory: str
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    settings: Mapping[str, Any] = field(default_factory=dict)


def make_work(
    asked: Asked,
    target: Target,
    *,
    batch_sizes: Sequence[int],
    num_new: int,
    num_rounds: int,
    source: Sequence[int],
) -> Work:
    """The measurements to make; `source`: ids that prompts are cut from."""
    dtypes = list(asked.dtypes) or [str(target.dtype).removeprefix("torch.")]
    return Work(
        dtypes=dtypes,
        batch_sizes=batch_sizes,
        num_new=num_new,
        length=asked.length,
        num_rounds=num_rounds,
        num_threads=asked.num_threads or torch.get_num_threads(),
        source=source,
        vocab_size=target.model.vocab_size,
        weight_bytes={dtype: weight_bytes(target.model, dtype) for dtype in dtypes},
        busy=asked.busy,
    )


def make_spec(name: str, dtype: str, work: Work, target: Target, scratch: str) -> Spec:
    """How the engine `name` is loaded."""
    return Spec(
        where=ENGINES[name].where,
        model=target.directory,
        dtype=dtype,
        device=str(target.device),
        dummy=target.settings.get("load_format") == "dummy",
        num_threads=work.num_threads,
        num_seqs=max(work.batch_sizes),
        max_len=work.length + max(work.num_new, PROMPT_NEW),
        scratch=scratch,
        settings=dict(target.settings) if name == OURS else {},
    )


def compare(peers: Sequence[str], work: Work, target: Target, tell: Callable[[str], None]) -> Beside:
    """Measure our engine and `peers`. On a GPU engines run one after the other, each with the whole memory."""
    on_cpu = target.device.type == "cpu"
    names = [OURS, *peers, *([MEMORY] if on_cpu else [])]
    interrupted = []
    with tempfile.TemporaryDirectory() as scratch:

        def start(name: str, dtype: str) -> EngineProcess:
            if ENGINES[name].needs_cpu and not on_cpu:
                raise EngineFailedError("is compared on a CPU only")
            return EngineProcess(name, make_spec(name, dtype, work, target, scratch))

        comparison = Comparison(work, names, start, together=on_cpu, tell=tell)
        try:
            comparison.run()
        except KeyboardInterrupt:
            interrupted = ["interrupted: what was not measured is missing"]
    return Beside(
        rows=comparison.rows(),
        busy=comparison.busy_rows(),
        engines=comparison.engines,
        bytes_per_second=comparison.read_rates(),
        notes=comparison.all_notes() + interrupted,
    )
