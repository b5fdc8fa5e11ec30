"""Gemma 4's assistant: a few layers without keys and values of their own, which read the target's.

Its query sits at the position of the token that it reads, and stays there for all drafts of a round: that is how the
reference implementation runs it (another engine puts it one lower; drafts differ, outputs do not).
Shapes: N draft rows, M read rows, H its hidden size, C centroids, S tokens of a centroid, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, InputLayout, Taps
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.fits import check_leftovers, check_vocabulary
from draftproof.drafters.head import HeadDrafter
from draftproof.models import gemma
from draftproof.models.config import ModelConfig
from draftproof.models.gemma_config import GemmaConfig
from draftproof.models.layers import Build, Linear, run_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Settings:
    """`layers`: the assistant's own; `num_centroids` 0: logits of all tokens are computed, else those of the tokens of
    the best `num_chosen` centroids."""

    layers: ModelConfig
    backbone_hidden_size: int
    num_centroids: int = 0
    num_chosen: int = 0


class CentroidHead:
    """Logits of the tokens that belong to the best centroids; every other token gets 1 less than the least of them."""

    def __init__(self, build: Build, s: Gemma4Settings, weight_VH: Tensor, order_V: Tensor) -> None:
        self._weight_VH = weight_VH
        self._tokens_CS = order_V.view(s.num_centroids, -1)
        self._num_chosen = s.num_chosen
        self._centroids = build.linear(
            "masked_embedding.centroids", weight_VH.shape[1], s.num_centroids, out_dtype=torch.float32
        )

    def __call__(self, hidden_MH: Tensor) -> Tensor:
        """fp32 [M, V]."""
        chosen_MC = self._centroids(hidden_MH).topk(self._num_chosen, dim=-1).indices
        tokens_MX = self._tokens_CS[chosen_MC].flatten(1)
        found_MX = torch.bmm(self._weight_VH[tokens_MX].float(), hidden_MH.float()[:, :, None]).squeeze(2)
        least_M1 = found_MX.amin(dim=-1, keepdim=True) - 1.0
        return least_M1.repeat(1, len(self._weight_VH)).scatter_(1, tokens_MX, found_MX)


class Gemma4Head:
    """A `DraftHead`: `x = pre_projection([scaled embed(token); state])`, layers, `d = norm(x)`; logits are made of d,
    and `post_projection(d)` is the next row's state. The first state is the target's after its final norm."""

    ids_V: Tensor | None = None

    def __init__(self, given: DraftBuild, s: Gemma4Settings) -> None:
        config, build, target = s.layers, given.build, given.target
        own = config.gemma
        assert own is not None
        self.spec = DraftSpec(
            taps=Taps(final=True),
            layout=lambda _: InputLayout(context="last", shift=1),
            borrow=_lent(given, s, own),
            advance=0,
        )
        hidden, backbone = config.hidden_size, s.backbone_hidden_size
        self._concat, self._embed = build.ops.concat, target.embed
        self._before = build.linear("pre_projection", 2 * backbone, hidden)
        self._after = build.linear("post_projection", hidden, backbone)
        # the target's tables; a row is told the place of the state that it goes on from: its token's is one higher
        tables = {rope: table_PD[1:] for rope, table_PD in target.rope_tables.items()}
        # its sliding layers were trained to see one row more than the window
        self._layers = [
            gemma.GemmaLayer(
                build, f"model.layers.{i}", config, x, tables[x.rope], window=x.window + 1 if x.window else 0
            )
            for i, x in enumerate(own.layers)
        ]
        self._norm = gemma.norm(build, "model.norm", hidden, config)
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        weight_VH = build.tensor(f"{name}.weight", (config.vocab_size, hidden))
        self._head: Linear
        if s.num_centroids:
            self._head = CentroidHead(build, s, weight_VH, _order(given, s))
        else:
            self._head = build.pack(weight_VH, out_dtype=torch.float32)
        check_leftovers(given)

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        return taps[0]

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        assert features_NF is not None
        stream_NH = self._before(self._concat((self._embed(tokens_N), features_NF)))
        first = self._layers[0].input_norm
        assert first is not None
        x_NH, residual_NH = run_layers(self._layers, first(stream_NH), stream_NH, attn)
        hidden_NH, _ = self._norm.add(x_NH, residual_NH)
        return hidden_NH, self._after(hidden_NH)

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._head(hidden_MH)


def _lent(given: DraftBuild, s: Gemma4Settings, own: GemmaConfig) -> tuple[int, ...]:
    """Which of the target's caches the assistant's kinds of layers read; ValueError where the pair does not fit."""
    assert given.checkpoint is not None
    where, target = given.checkpoint.where, given.target.config
    other = "this assistant belongs to another target"
    if target.gemma is None or not target.gemma.values_normed:
        raise ValueError(
            f"{where}: model_type='gemma4_assistant', but the target's is {target.model_type!r}; an assistant reads "
            "the keys and values of a Gemma 4 target"
        )
    check_vocabulary(given, s.layers.vocab_size)
    if s.backbone_hidden_size != target.hidden_size:
        raise ValueError(
            f"{where}: backbone_hidden_size={s.backbone_hidden_size}, but the target's hidden_size is "
            f"{target.hidden_size}; {other}"
        )
    lent = []
    for kind in own.kinds:
        cache = target.gemma.last_cache(kind)
        if cache is None:
            raise ValueError(f"{where}: has layers of type {kind!r}, but the target has none; {other}")
        mine = next(layer for layer in own.layers if layer.kind == kind)
        theirs = next(layer for layer in target.gemma.layers if layer.owns_cache and layer.cache == cache)
        for name in ("num_kv_heads", "head_dim", "rope"):
            wanted, found = getattr(mine, name), getattr(theirs, name)
            if wanted != found:
                raise ValueError(f"{where}: {kind}: {name}={wanted}, but the target's is {found}; {other}")
        lent.append(cache)
    return tuple(lent)


def _order(given: DraftBuild, s: Gemma4Settings) -> Tensor:
    """int64 [V]: the tokens of the first centroid, of the second, ..."""
    assert given.checkpoint is not None
    where, vocab = given.checkpoint.where, s.layers.vocab_size
    if vocab % s.num_centroids or not 1 <= s.num_chosen <= s.num_centroids:
        raise ValueError(
            f"{where}: num_centroids={s.num_centroids}, centroid_intermediate_top_k={s.num_chosen}: the first must "
            f"divide vocab_size={vocab}, the second lie between 1 and the first"
        )
    order_V = given.checkpoint.weights.get("masked_embedding.token_ordering", (vocab,)).long()
    if not torch.equal(order_V.sort().values, torch.arange(vocab)):
        raise ValueError(
            f"{where}: masked_embedding.token_ordering must name each of {vocab} tokens once; download the files again"
        )
    return order_V.to(given.device)


def build(given: DraftBuild) -> HeadDrafter:
    return HeadDrafter(Gemma4Head(given, given.settings(Gemma4Settings)), given.num_drafts)
