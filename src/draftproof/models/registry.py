"""Tables of the kinds of mixers, feed-forward parts and config readers; a new kind is a row here.

A mixer or a feed-forward part is a file in `mixers/` or `ffns/`; families refer to it by name, and its config keys are
then accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftproof import schema
from draftproof.models.families import Family
from draftproof.models.ffns import beside, dense, experts
from draftproof.models.gemma_config import read_gemma
from draftproof.models.mixers import attention, latent, shared_kv
from draftproof.models.reading import Given, check_family_keys
from draftproof.models.spec import Body, FfnConfig, LayerSpec, MixerConfig, Norms

Reader = Callable[[Mapping[str, Any], Family, str, Collection[str]], tuple[Mapping[str, Any], Body]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerKind:
    """A row. `config`: a layer's data; `read`: creates it for each layer from a config.json, None if only readers of
    single families do; `keys`: the config keys that it reads."""

    config: type[MixerConfig]
    read: Callable[[Given], list[MixerConfig]] | None = None
    keys: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnKind:
    """A row, as `MixerKind`; config keys of experts belong to their family."""

    config: type[FfnConfig]
    read: Callable[[Given], list[FfnConfig]] | None = None


MIXERS: dict[str, MixerKind] = {
    "attention": MixerKind(config=attention.AttentionConfig, read=attention.read),
    "shared_kv": MixerKind(config=shared_kv.SharedKVConfig),
    "latent": MixerKind(config=latent.LatentConfig, read=latent.read, keys=latent.KEYS),
}
FFNS: dict[str, FfnKind] = {
    "dense": FfnKind(config=dense.DenseConfig, read=dense.read),
    "experts": FfnKind(config=experts.ExpertsConfig, read=experts.read),
    "beside": FfnKind(config=beside.BesideConfig),
}


def read_alike(
    raw: Mapping[str, Any], family: Family, where: str, extra: Collection[str]
) -> tuple[Mapping[str, Any], Body]:
    """(the config, layers with the family's one kind of mixer and of feed-forward part). Raises ValueError for unknown
    keys."""
    given = Given(raw=raw, family=family, where=where)
    mixer, ffn = MIXERS[family.mixer], FFNS[family.ffn]
    check_family_keys(given, family.keys | mixer.keys, extra)
    assert mixer.read is not None and ffn.read is not None
    norms = Norms(eps=schema.number(raw, "rms_norm_eps", where, default=1e-6))
    given.num_kv_heads, given.whole("intermediate_size")  # validated even if no part reads them
    parts = zip(mixer.read(given), ffn.read(given), strict=True)
    return raw, Body(layers=tuple(LayerSpec(mixer=m, ffn=f, norms=norms) for m, f in parts))


# Config readers, by the name that families use.
READERS: dict[str, Reader] = {
    "alike": read_alike,
    "gemma3": partial(read_gemma, generation=3),
    "gemma4": partial(read_gemma, generation=4),
}
