"""Chooses device and dtype, and how much memory the cache may take."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from draftproof.cache.pool import PagedKV
from draftproof.cache.windows import MARGIN
from draftproof.config import EngineConfig
from draftproof.models.cases import Where
from draftproof.models.config import ModelConfig
from draftproof.runtime import native
from draftproof.runtime.room import free_bytes

MANY_ROWS = 1_000_000  # so many that every expert is chosen
CACHE_SHARE = 0.4  # on a CPU: share of the memory that is free after loading the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """An engine's use of memory, in bytes. `graphs`: CUDA graphs, 0 on a CPU; `window_kv`: keys and values of windowed
    layers, which `kv_bytes_per_token` leaves out; `encoder`: weights of the image encoder; `items`: maximum for cached
    embeddings of images; `unread`: the bytes that packing saves the target's products from reading, compared with their
    weights in files."""

    weights: int
    draft_weights: int
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    graphs: int
    window_kv: int = 0
    encoder: int = 0
    items: int = 0
    unread: int = 0

    @property
    def kv_tokens(self) -> int:
        """Capacity in tokens; block 0 is reserved as scratch."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def kv(self) -> int:
        """Bytes of the target's and the drafter's keys and values."""
        each = self.kv_bytes_per_token + self.draft_kv_bytes_per_token
        return self.num_blocks * self.block_size * each + self.window_kv

    def __str__(self) -> str:
        drafter = f", draft weights {_size(self.draft_weights)}" if self.draft_weights else ""
        of_it = (
            f" ({_size(self.draft_kv_bytes_per_token)} more for drafts)"
            if self.draft_kv_bytes_per_token
            else ""
        )
        graphs = f", CUDA graphs {_size(self.graphs)}" if self.graphs else ""
        windows = f", and {_size(self.window_kv)} of layers that see a window" if self.window_kv else ""
        images = (
            f", image encoder {_size(self.encoder)}, embeddings of images up to {_size(self.items)}"
            if self.encoder
            else ""
        )
        return (
            f"memory: weights {_size(self.weights)}{drafter}{images}{graphs}; keys and values {_size(self.kv)}: "
            f"{self.num_blocks} blocks, {self.kv_tokens} tokens of {_size(self.kv_bytes_per_token)}{of_it}{windows}"
        )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def forecast(
    directory: Path,
    config: EngineConfig,
    model: ModelConfig,
    where: Where,
    max_model_len: int,
    packed_share: float,
) -> str:
    """Log line before loading: the target's estimated memory, and the room left for requests. Weights are estimated by
    the files' sizes. `packed_share`: size of a product's packed weight relative to its unpacked one."""
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    stored_as = model.dtype or where.dtype
    weights = _held(stored * where.dtype.itemsize // stored_as.itemsize, model, where, packed_share)
    free, per_token = free_bytes(where.device), bytes_per_token(model.caches, where.dtype)
    if config.num_kv_blocks is not None:
        num_tokens = (config.num_kv_blocks - 1) * config.block_size
    else:
        num_tokens = max(0, _cache_bytes(config, where.device, max(0, free - weights))) // per_token
    num_requests = min(config.max_num_seqs, num_tokens // max_model_len)
    return (
        f"to load: weights of about {_size(weights)}, {_size(free)} are free; then there is room for about "
        f"{num_tokens} tokens of {_size(per_token)}: {num_requests} requests of max_model_len={max_model_len} at once, "
        f"of max_num_seqs={config.max_num_seqs}, without a drafter"
    )


def _held(stored: int, model: ModelConfig, where: Where, packed_share: float) -> int:
    """Estimated memory for weights of `stored` bytes. On a CPU products hold packed copies, so an embedding that is
    also the output layer exists twice. Experts' weights are not packed; those of the experts that a row does not
    choose approximate their size."""
    if where.device.type != "cpu":
        return stored
    embedding = model.vocab_size * model.hidden_size * where.dtype.itemsize
    ffns = [layer.ffn.num_weights(model.hidden_size, MANY_ROWS) for layer in model.layers]
    whole = embedding + sum(int(ffn.read - ffn.used) for ffn in ffns) * where.dtype.itemsize
    products = stored - whole + (embedding if model.tie_word_embeddings else 0)
    return int(whole + products * packed_share)


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto`: the GPU if there is one. ValueError for a device that is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r}: must be 'auto', 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device={name!r}: not available here; use 'auto' or 'cpu'")
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"device={name!r}: an engine runs on its process's current device; start it with "
            f"CUDA_VISIBLE_DEVICES={device.index} and device='cuda'"
        )
    return device


def pick_dtype(
    name: str, stored: torch.dtype | None, device: torch.device, library: native.Library | None
) -> torch.dtype:
    """The dtype of that name; `auto`: the stored dtype, but on a CPU half precision only if the compiled operators or
    the processor support it (bfloat16 where the processor does)."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if stored in (None, torch.float32):
        return torch.float32
    if device.type == "cuda":
        return stored
    if _has_bfloat16():
        return torch.bfloat16
    return torch.float32 if library is None else stored


def _has_bfloat16() -> bool:
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def bytes_per_token(shapes: Sequence[PagedKV], dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all these layers."""
    return sum(shape.bytes_per_token(dtype) for shape in shapes)


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The layers with a sliding window of `window` positions. They never need more than `most` blocks: what running
    requests can see, and as much again for cached prefixes."""

    window: int
    bytes_per_token: int
    most: int

    def num_blocks(self, num_others: int) -> int:
        return min(self.most, num_others)


def window_groups(
    shapes: Sequence[PagedKV],
    dtype: torch.dtype,
    config: EngineConfig,
    max_model_len: int,
    num_lookahead: int,
    most_rows: int,
) -> tuple[WindowGroup, ...]:
    """A target's windowed layers, grouped by window. `num_lookahead`: positions past its rows for which a request has
    pages; `most_rows`: maximum rows of a pass."""
    size = config.block_size
    groups = []
    for window in sorted({shape.window for shape in shapes if 0 < shape.window < max_model_len}):
        # + 2: the first and the last page are only partly inside the window
        of_request = -(-(window + MARGIN + num_lookahead) // size) + 2
        in_flight = -(-2 * most_rows // size)  # rows of the pass that runs and of the next one
        live = config.max_num_seqs * of_request + in_flight
        own = [shape for shape in shapes if shape.window == window]
        groups.append(WindowGroup(window, bytes_per_token(own, dtype), 2 * live + 1))
    return tuple(groups)


def num_blocks(
    per_token: int,
    groups: Sequence[WindowGroup],
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
    num_spare: int = 0,
) -> int:
    """Number of cache blocks: the config's; else enough for all sequences at maximum length, or as many as fit into the
    free memory less `num_spare` bytes. `per_token`: bytes per token in full-attention layers.

    ValueError if the config's number does not fit, or not even one sequence does.
    """

    def needed(number: int) -> int:
        each = number * per_token + sum(group.num_blocks(number) * group.bytes_per_token for group in groups)
        return config.block_size * each

    free, given = free_bytes(device), config.num_kv_blocks
    if given is not None:
        if needed(given) > free:
            raise ValueError(
                f"num_kv_blocks={given}: needs {needed(given) / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are "
                "free; lower it, or leave it out"
            )
        return given
    per_sequence = -(-max_model_len // config.block_size)
    wanted = config.max_num_seqs * per_sequence + 1
    usable = max(0, _cache_bytes(config, device, free) - num_spare)
    if needed(per_sequence + 1) > usable:
        raise ValueError(
            f"max_model_len={max_model_len}: its keys and values need {needed(per_sequence) / 2**30:.2f} GiB, and "
            f"{usable / 2**30:.2f} GiB may be used; lower max_model_len, or set num_kv_blocks"
        )
    if needed(wanted) <= usable:
        return wanted
    return bisect.bisect_right(range(wanted), usable, lo=per_sequence + 1, key=needed) - 1


def check_tables(config: EngineConfig, max_model_len: int, rotary_sizes: int, device: torch.device) -> None:
    """ValueError if the tables with an entry per position do not fit into memory: tokens and blocks of every slot, and
    cosines and sines of `rotary_sizes` dimensions."""
    per_position = 4 * (rotary_sizes + (config.max_num_seqs + 1) * (1 + 1 / config.block_size))
    needed, free = max_model_len * per_position, free_bytes(device)
    if needed > free:
        raise ValueError(
            f"max_model_len={max_model_len}: tables of all positions would take {needed / 2**30:.2f} GiB, but "
            f"{free / 2**30:.2f} GiB are free; lower max_model_len or max_num_seqs"
        )


def _cache_bytes(config: EngineConfig, device: torch.device, free: int) -> int:
    if device.type != "cuda":
        return int(free * CACHE_SHARE / config.data_parallel_size)  # replicas share a host's memory
    total = torch.cuda.get_device_properties(device).total_memory
    return int(config.gpu_memory_utilization * total) - (total - free)


@contextmanager
def must_fit(config: EngineConfig) -> Iterator[None]:
    """Turn running out of the GPU's memory into a ValueError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(
            f"model={config.model!r}: does not fit into the GPU's memory ({reason}); free some, lower max_num_seqs or "
            "max_num_batched_tokens, or take a smaller model or drafter"
        ) from error


def peak_bytes(rehearse: Callable[[], None]) -> int:
    """Three times the peak GPU memory of `rehearse`: for eager passes, for the graphs of whole steps, and for the
    graphs of parts of steps, which are smaller but of several kinds."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rehearse()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return 3 * peak
