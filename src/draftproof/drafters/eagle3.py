"""EAGLE-3: one layer (or more) that reads fused target states and its own feedback. Li et al., arXiv 2503.01840.

Shapes: T target rows, N draft rows, M read rows, F = H fused width, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.cache.pool import KVShape
from draftproof.drafters.base import DraftSpec, InputLayout, Taps
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.fits import check_vocabulary
from draftproof.drafters.head import HeadDrafter
from draftproof.models.config import ModelConfig
from draftproof.models.layers import Build, DecoderLayer, Norm, run_layers
from draftproof.models.rope import cos_sin_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Settings:
    """`layers` describes the draft's own decoder layers; `taps` None: 2, n/2 and n-3 of the target's n layers."""

    layers: ModelConfig
    draft_vocab_size: int
    taps: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Head:
    """`a = [input_layernorm(embed); hidden_norm(h)]` into the first layer; logits from `norm(x)`."""

    def __init__(self, given: DraftBuild) -> None:
        s = given.settings(Eagle3Settings)
        build, config, hidden = given.build, s.layers, s.layers.hidden_size
        taps = _taps(s, given)
        self._settings = s
        self._ops = build.ops
        self.spec = DraftSpec(
            taps=Taps(layers=taps),
            layout=lambda _: InputLayout(context="all", shift=1),
            kv=tuple(
                KVShape(heads=config.num_kv_heads, head_dim=config.head_dim, window=w) for w in config.windows
            ),
        )
        target_hidden = given.target.config.hidden_size
        self._input_norm = (
            _norm(build, "input_norm", len(taps) * target_hidden, config) if s.norm_before_fc else None
        )
        self._fc_norms = [
            _norm(build, f"fc_norm.{i}", target_hidden, config) for i in range(len(taps)) if s.fc_norm
        ]
        self._fc = build.linear("fc", len(taps) * target_hidden, hidden)
        table = cos_sin_table(config.rope, given.max_positions, build.device)
        self._layers = [
            DecoderLayer(build, f"layers.{i}", config, table, i, w, 2 * hidden if i == 0 else None)
            for i, w in enumerate(config.windows)
        ]
        self._hidden_norm = _norm(build, "layers.0.hidden_norm", hidden, config)
        self._norm = _norm(build, "norm", hidden, config)
        vocab = config.vocab_size
        self._embed_VH = given.own_or_target("embed_tokens.weight", given.target_embed_name, (vocab, hidden))
        self.ids_V, head_DH = _reduced_head(s, given)
        self._head = build.pack(head_DH, out_dtype=torch.float32)

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        if self._fc_norms:
            taps = tuple(norm(tap) for norm, tap in zip(self._fc_norms, taps, strict=True))
        fused_TF = self._ops.concat(taps)
        return self._fc(self._input_norm(fused_TF) if self._input_norm else fused_TF)

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        assert features_NF is not None
        embed_norm = self._layers[0].input_norm
        assert embed_norm is not None
        normed_NH = self._hidden_norm(features_NF)
        residual_NH = normed_NH if self._settings.norm_before_residual else features_NF
        embedded_NH = embed_norm(self._ops.gather(self._embed_VH, tokens_N))
        x_NX = self._ops.concat((embedded_NH, normed_NH))
        x_NH, residual_NH = run_layers(self._layers, x_NX, residual_NH, attn)
        out_NH, stream_NH = self._norm.add(x_NH, residual_NH)
        return out_NH, out_NH if self._settings.norm_output else stream_NH

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._head(hidden_MH)


def build(given: DraftBuild) -> HeadDrafter:
    return HeadDrafter(Eagle3Head(given), given.num_drafts)


def _norm(build: Build, name: str, size: int, config: ModelConfig) -> Norm:
    return Norm.load(build, name, size, config.norm_eps)


def _taps(s: Eagle3Settings, given: DraftBuild) -> tuple[int, ...]:
    """The tapped layers, checked against the target; so are the other sizes that must agree."""
    assert given.checkpoint is not None
    where, target = given.checkpoint.where, given.target.config
    check_vocabulary(given, s.layers.vocab_size)
    taps = s.taps
    if taps is None:
        n = target.num_layers
        taps = (2, n // 2, n - 3)
        if n <= 6:
            raise ValueError(
                f"{where}: names no tapped layers, and the usual ones {list(taps)} make no sense for a target of "
                f"{n} layers; add eagle_aux_hidden_state_layer_ids to its config.json"
            )
    given.target.check_taps(taps)
    shape = given.checkpoint.weights.shape("fc.weight")
    if shape is not None and shape[1] != len(taps) * target.hidden_size:
        raise ValueError(
            f"{where}: fc.weight reads {shape[1]} features, but {len(taps)} tapped layers of the target's "
            f"hidden_size={target.hidden_size} are {len(taps) * target.hidden_size}; this draft head belongs to "
            "another target"
        )
    return taps


def _reduced_head(s: Eagle3Settings, given: DraftBuild) -> tuple[Tensor | None, Tensor]:
    """(target id of each column or None, weight of the head); the target's rows where the file has no head."""
    assert given.checkpoint is not None
    weights, vocab, hidden = given.checkpoint.weights, s.layers.vocab_size, s.layers.hidden_size
    if s.draft_vocab_size == vocab:
        return None, given.own_or_target("lm_head.weight", given.target_head_name, (vocab, hidden))
    offsets_D = weights.get("d2t", (s.draft_vocab_size,)).long()
    ids_D = offsets_D + torch.arange(s.draft_vocab_size)
    if not 0 <= int(ids_D.min()) <= int(ids_D.max()) < vocab:
        raise ValueError(f"{given.checkpoint.where}: d2t maps outside the vocabulary of {vocab}")
    if "lm_head.weight" in weights:
        head_DH = given.build.tensor("lm_head.weight", (s.draft_vocab_size, hidden))
    else:
        full_VH = given.build.reading(given.target_weights).tensor(given.target_head_name, (vocab, hidden))
        head_DH = full_VH[ids_D]
    return ids_D.to(given.device), head_DH
