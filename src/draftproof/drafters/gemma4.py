"""Gemma 4's assistant: a few layers without keys and values of their own, which read the target's.

Its query has the position of the token that it reads, and keeps it for all drafts of a round, as in the reference
implementation (another engine puts it one lower; drafts differ, outputs do not).
Shapes: T target rows, N draft rows, M read rows, H its hidden size, V vocabulary, C centroids, S tokens of a centroid,
X tokens scored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, Taps
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import DraftHead, HeadDrafter, HeadLayout, PassSize
from draftproof.drafters.validation import check_hidden, check_leftovers, check_vocabulary
from draftproof.models import cost
from draftproof.models.builder import Linear
from draftproof.models.config import ModelConfig
from draftproof.models.cost import Cost
from draftproof.models.layers import load_layers, run_layers
from draftproof.models.mixers.attention import AttentionConfig
from draftproof.models.mixers.shared_kv import SharedKVConfig
from draftproof.models.spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Settings:
    """Settings of an assistant. `layers`: its own; `num_centroids` 0: logits of all tokens are computed, else only of
    the tokens of the best `num_chosen` centroids."""

    layers: ModelConfig
    backbone_hidden_size: int
    num_centroids: int = 0
    num_chosen: int = 0


class CentroidHead:
    """An output head that scores part of the vocabulary: the tokens of the centroids nearest to a state. Every other
    token's logit is the smallest of those minus 1."""

    def __init__(self, ctx: DraftContext, num_centroids: int, num_chosen: int, weight_VH: Tensor) -> None:
        vocab, hidden = weight_VH.shape
        self._weight_VH = weight_VH
        self._tokens_CS = _token_order(ctx, num_centroids, num_chosen, vocab).view(num_centroids, -1)
        self._num_chosen = num_chosen
        self._centroids = ctx.builder.linear(
            "masked_embedding.centroids", hidden, num_centroids, out_dtype=torch.float32
        )

    def __call__(self, hidden_MH: Tensor) -> Tensor:
        """The logits, fp32 [M, V]."""
        chosen_MC = self._centroids(hidden_MH).topk(self._num_chosen, dim=-1).indices
        tokens_MX = self._tokens_CS[chosen_MC].flatten(1)
        found_MX = torch.bmm(self._weight_VH[tokens_MX].float(), hidden_MH.float()[:, :, None]).squeeze(2)
        least_M1 = found_MX.amin(dim=-1, keepdim=True) - 1.0
        return least_M1.repeat(1, len(self._weight_VH)).scatter_(1, tokens_MX, found_MX)

    def cost(self, num_rows: int) -> Cost:
        """Cost of `num_rows`: every row reads the weights of its own tokens."""
        elements = self._num_chosen * self._tokens_CS.shape[1] * self._weight_VH.shape[1]
        each = cost.products(elements, 1, self._weight_VH.element_size())
        return cost.linear(self._centroids, num_rows) + each * num_rows


class Gemma4Head(DraftHead):
    """`x = pre_projection([scaled embed(token); state])`, layers, `d = norm(x)`; logits come from d, and
    `post_projection(d)` is the next row's state. The first state is the target's after its final norm."""

    ids_V: Tensor | None = None

    def __init__(self, ctx: DraftContext, s: Gemma4Settings) -> None:
        config = s.layers
        builder = ctx.builder
        target = ctx.target
        self._config = config
        self.spec = DraftSpec(
            taps=Taps(final=True),
            borrow=_caches_lent(ctx, config, s.backbone_hidden_size),
        )
        self.layout = HeadLayout(context="last", shift=1, advance=0)
        ctx.notes["embed_tokens"] = "the target's"
        hidden = config.hidden_size
        backbone = s.backbone_hidden_size
        self._concat = builder.ops.concat
        self._embed = target.embed
        self._before = builder.linear("pre_projection", 2 * backbone, hidden)
        self._after = builder.linear("post_projection", hidden, backbone)
        # the target's tables, shifted: a row's position is that of its state, and its token's is one higher
        tables = {rope: table_PD[1:] for rope, table_PD in target.rope_tables.items()}
        # its sliding layers were trained to see one row more than the window
        self._layers = load_layers(builder, "model.layers.", _with_one_row_more(config), tables)
        self._norm = builder.norm("model.norm", hidden, config.norm_eps, config.norm_offset)
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        weight_VH = builder.tensor(f"{name}.weight", (config.vocab_size, hidden))
        self._head: Linear
        if s.num_centroids:
            self._head = centroids = CentroidHead(ctx, s.num_centroids, s.num_chosen, weight_VH)
            self._logits_cost = centroids.cost
        else:
            self._head = packed = builder.pack(weight_VH, out_dtype=torch.float32)
            self._logits_cost = partial(cost.linear, packed)
        check_leftovers(ctx)

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

    def cost(self, size: PassSize) -> Cost:
        num_rows = size.requests * size.fed
        found = cost.linear(self._before, num_rows) + cost.linear(self._after, num_rows)
        found += cost.layers_products(self._config, num_rows, self._before.weight_itemsize)
        found += cost.attention(self._config, size.requests, size.fed, size.context, size.itemsize)
        return found + self._logits_cost(size.requests * size.read)


def _with_one_row_more(config: ModelConfig) -> ModelConfig:
    """The layers with each window longer by one row."""

    def wider(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        assert isinstance(mixer, SharedKVConfig), "the reader lets an assistant borrow everything"
        return replace(layer, mixer=replace(mixer, window=mixer.window + 1 if mixer.window else 0))

    return replace(config, layers=tuple(map(wider, config.layers)))


def _caches_lent(ctx: DraftContext, layers: ModelConfig, backbone_hidden_size: int) -> tuple[int, ...]:
    """Indices of the target's caches that the assistant's layer types read; ValueError if the models do not match."""
    assert ctx.checkpoint is not None
    where = ctx.checkpoint.where
    target = ctx.target.config
    other = "this assistant belongs to another target"
    mixers = [layer.mixer for layer in target.layers]
    if not any(isinstance(mixer, AttentionConfig) and mixer.v_norm for mixer in mixers):
        raise ValueError(
            f"{where}: model_type='gemma4_assistant', but the target's is {target.model_type!r}; an assistant reads "
            "the keys and values of a Gemma 4 target"
        )
    check_vocabulary(ctx, layers.vocab_size)
    check_hidden(ctx, backbone_hidden_size, "backbone_hidden_size")
    lent: dict[int, int] = {}
    for mine in (layer.mixer for layer in layers.layers):
        assert isinstance(mine, SharedKVConfig)
        kind = "sliding_attention" if mine.window else "full_attention"
        found = _last_writer(target, slides=mine.window > 0)
        if found is None:
            raise ValueError(f"{where}: has layers of type {kind!r}, but the target has none; {other}")
        cache, theirs = found
        for name in ("num_kv_heads", "head_dim", "rope", "window"):
            if getattr(mine, name) != getattr(theirs, name):
                raise ValueError(
                    f"{where}: {kind}: {name}={getattr(mine, name)}, but the target's is {getattr(theirs, name)}; "
                    f"{other}"
                )
        lent[mine.reads] = cache
    return tuple(lent[i] for i in range(len(lent)))


def _last_writer(target: ModelConfig, *, slides: bool) -> tuple[int, AttentionConfig] | None:
    """(cache index, mixer) of the target's last layer of a type (sliding or full) that has its own cache."""
    for layer, cache in zip(reversed(target.layers), reversed(target.cache_of_layer), strict=True):
        if isinstance(layer.mixer, AttentionConfig) and (layer.window > 0) == slides:
            return cache, layer.mixer
    return None


def _token_order(ctx: DraftContext, num_centroids: int, num_chosen: int, vocab: int) -> Tensor:
    """Token ids grouped by centroid: those of the first, of the second, ...: int64 [V]."""
    assert ctx.checkpoint is not None
    where = ctx.checkpoint.where
    if vocab % num_centroids or not 1 <= num_chosen <= num_centroids:
        raise ValueError(
            f"{where}: num_centroids={num_centroids}, centroid_intermediate_top_k={num_chosen}: the first must "
            f"divide vocab_size={vocab}, the second lie between 1 and the first"
        )
    order_V = ctx.checkpoint.weights.get("masked_embedding.token_ordering", (vocab,), "ids").long()
    if not torch.equal(order_V.sort().values, torch.arange(vocab)):
        raise ValueError(
            f"{where}: masked_embedding.token_ordering must name each of {vocab} tokens once; download the files again"
        )
    return order_V.to(ctx.device)


def build(ctx: DraftContext) -> HeadDrafter:
    return HeadDrafter(Gemma4Head(ctx, ctx.settings(Gemma4Settings)))
