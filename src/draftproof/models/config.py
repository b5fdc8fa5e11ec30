"""A model's constants, read from its config.json."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof import schema
from draftproof.attention.exactness import AttentionShape
from draftproof.cache.pool import PagedKV
from draftproof.cache.states import StateSpec
from draftproof.models import registry, vision
from draftproof.models.families import FAMILIES, Family
from draftproof.models.reading import stored_dtype
from draftproof.models.rope import RopeConfig
from draftproof.models.spec import LayerSpec
from draftproof.schema import flag, whole

# Prefixes of model types that resemble a supported one by name, and why they are refused.
_OTHER_LAYERS: Mapping[str, str] = {
    "qwen3_next": "has layers of linear attention",
    "qwen3_5": "has layers of linear attention",
    "qwen3_vl_moe": "reads images and has experts",
    "qwen2_vl": "reads images",
    "minimax": "has layers of linear attention",
    "kimi_linear": "has layers of linear attention",
    "deepseek_v32": "has sparse attention with an indexer",
    "mamba": "has Mamba layers",
    "falcon_h1": "has Mamba layers",
    "mimo_v2": "has attention sinks and heads of several sizes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The constants of one decoder. Sizes are numbers of elements. Embeddings are multiplied by `embed_scale`;
    `logit_cap` 0: logits are not capped; `blank_id`: as in `Body`.

    `norm_eps` and `norm_offset` are the final norm's. `dtype`: the weights' dtype according to the config; None if it
    does not say.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_offset: float = 0.0
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    embed_scale: float = 1.0
    logit_cap: float = 0.0
    blank_id: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of its layers, each once."""
        return tuple(dict.fromkeys(rope for layer in self.layers for rope in layer.mixer.ropes))

    @property
    def may_leave_rows(self) -> bool:
        """Whether in a pass of all its layers some rows may only be stored: with more layers than one, later layers
        would store what is computed from them."""
        return len(self.layers) == 1 and self.layers[0].mixer.leaves_rows

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """The attention shapes of its layers, each once."""
        shapes = [layer.mixer.shape for layer in self.layers]
        return tuple(dict.fromkeys(shape for shape in shapes if shape is not None))

    @property
    def caches(self) -> tuple[PagedKV, ...]:
        """The caches of its layers; a cache's window is the longest among the layers that read it."""
        own = [kept for layer in self.layers for kept in layer.mixer.caches if isinstance(kept, PagedKV)]
        readers: list[list[int]] = [[] for _ in own]
        for layer, cache in zip(self.layers, self.cache_of_layer, strict=True):
            if own:  # else all are the target's
                readers[cache].append(layer.window)
        return tuple(
            dataclasses.replace(kept, window=max(windows) if all(windows) else 0)
            for kept, windows in zip(own, readers, strict=True)
        )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The per-slot states of its layers."""
        return tuple(s for layer in self.layers for s in layer.mixer.caches if not isinstance(s, PagedKV))

    @property
    def cache_of_layer(self) -> tuple[int, ...]:
        """Index into `caches` of the cache that each layer reads."""
        own = itertools.count()
        return tuple(next(own) if layer.mixer.reads is None else layer.mixer.reads for layer in self.layers)


@contextlib.contextmanager
def reading(where: object) -> Iterator[None]:
    """Context manager for reading a config: type errors from unexpected values become a ValueError naming the file."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"{where}: a key holds something of the wrong type ({type(error).__name__}: {error}); correct the file or "
            "download it again"
        ) from error


def read_config(
    directory: Path,
    families: Mapping[str, Family] = FAMILIES,
    *,
    extra: Collection[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The config of a language model in `directory`; extra as in `parse`, overrides as in `read_raw`. ValueError names
    the file, key and fix."""
    raw, where = read_raw(directory, overrides)
    return language_model(raw, where, families, extra=extra)


def read_vision(directory: Path, overrides: Mapping[str, Any] | None = None) -> vision.Vision | None:
    """The image settings of a config; None for a model without image input."""
    raw, where = read_raw(directory, overrides)
    with reading(where):
        return vision.read(raw, where, directory)


def read_raw(directory: Path, overrides: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """(config.json of `directory`, its name in errors). Keys of `overrides` replace the file's, objects are merged."""
    path = directory / "config.json"
    raw = schema.read_json(path)
    if not overrides:
        return raw, str(path)
    return schema.merged(raw, overrides), f"{path} with hf_overrides"


def language_model(
    raw: Mapping[str, Any],
    where: str,
    families: Mapping[str, Family] = FAMILIES,
    *,
    extra: Collection[str] = (),
) -> ModelConfig:
    """The config of a language model from the file's content; ValueError also if `architectures` names none."""
    with reading(where):
        config = parse(raw, families, where=where, extra=extra)
    seeing = vision.family_of(raw)
    known = families[config.model_type].architectures if seeing is None else seeing.architectures
    given = schema.texts(raw, "architectures", where) or known
    if not set(given) & set(known):
        raise ValueError(
            f"{where}: architectures={schema.shown(list(given))}: not a language model of type {config.model_type!r}; "
            f"must name {' or '.join(known)} (a draft head goes into speculative_config)"
        )
    return config


def parse(
    raw: Mapping[str, Any],
    families: Mapping[str, Family] = FAMILIES,
    *,
    where: str = "config.json",
    extra: Collection[str] = (),
) -> ModelConfig:
    """A Hugging Face config, or the part of a draft head's config that describes its layers, as a ModelConfig.

    where: name of the source in error messages. extra: keys that the caller handles itself. Raises
    ValueError for unknown model types and for keys that may change the arithmetic in a way not implemented here.
    """
    raw = vision.text_part(raw, where)
    family = _family(raw, families, where)
    raw, body = registry.READERS[family.reader](raw, family, where, extra)
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=whole(raw, "vocab_size", where),
        hidden_size=whole(raw, "hidden_size", where),
        layers=body.layers,
        norm_eps=body.layers[0].norms.eps,
        norm_offset=body.layers[0].norms.offset,
        max_position_embeddings=whole(raw, "max_position_embeddings", where),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", where),
        embed_scale=body.embed_scale,
        logit_cap=body.logit_cap,
        blank_id=body.blank_id,
        eos_token_ids=schema.token_ids(raw.get("eos_token_id"), f"{where}: eos_token_id"),
        dtype=stored_dtype(raw, where),
    )


def _family(raw: Mapping[str, Any], families: Mapping[str, Family], where: str) -> Family:
    kind = schema.text(raw, "model_type", where)
    if kind is not None and kind in families:
        return families[kind]
    known = f"supported: {', '.join(sorted(families))}"
    if kind is None:
        raise ValueError(f"{where}: no 'model_type', so this is no language model's config; {known}")
    reason = next((why for start, why in _OTHER_LAYERS.items() if kind.startswith(start)), None)
    if reason is not None:
        raise ValueError(
            f"{where}: model_type={schema.shown(kind)}: {reason}, which is not supported; {known}"
        )
    hint = schema.did_you_mean(kind, families)
    raise ValueError(
        f"{where}: model_type={schema.shown(kind)}: not supported; {hint}{' ' if hint else ''}{known}"
    )
