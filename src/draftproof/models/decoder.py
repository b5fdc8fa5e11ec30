"""The decoder: every supported language model is an instance of it.

Shapes: T rows, H hidden size, M rows whose logits are wanted, V vocabulary, P positions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.attention.given import GivenEmbeddings
from draftproof.kernels.ops import Ops
from draftproof.matmul.linear import LinearPlanner, PackedLinear
from draftproof.matmul.spec import DENSE
from draftproof.models.builder import LayerBuilder, Norm, rounded
from draftproof.models.config import ModelConfig
from draftproof.models.layer_inputs import LayerInputs
from draftproof.models.layers import Layer, SandwichLayer, load_layers, rope_tables
from draftproof.models.spec import LayerFn, RopeTables
from draftproof.models.weights import Weights, WeightSource, head_of, root_of


@dataclass(slots=True)
class TargetOutput:
    """Result of one pass. hidden_TH: the wanted rows' states after the final norm; taps: [T, H] each, as requested."""

    hidden_TH: Tensor
    taps: tuple[Tensor, ...]


class Decoder:
    """Embedding, layers, final norm and head. It has no modes: a pass is any mixture of rows, each a slot and position.

    embed_VH: the embedding before scaling; head: the product that computes logits, before any cap. Drafters without
    their own use these.
    """

    __slots__ = (
        "_cap",
        "_embed_scale",
        "_gather",
        "_layer_inputs",
        "_layers",
        "_norms",
        "_soft_cap",
        "config",
        "embed_VH",
        "head",
        "kv",
        "rope_tables",
        "states",
    )

    def __init__(
        self,
        config: ModelConfig,
        embed_VH: Tensor,
        layers: Sequence[Layer],
        final_norm: Norm,
        head: PackedLinear,
        tables: RopeTables,
        ops: Ops,
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        self.config = config
        self._gather = ops.gather
        self._soft_cap = ops.soft_cap
        self._layer_inputs = layer_inputs
        self._embed_scale = rounded(config.embed_scale, embed_VH.dtype)
        self._cap = config.logit_cap
        self.rope_tables = tables
        self.kv = config.caches
        self.states = config.states
        self.embed_VH = embed_VH
        self._layers = tuple(layers)
        input_norms = [layer.input_norm for layer in layers if layer.input_norm is not None]
        self._norms = (*input_norms, final_norm)
        assert len(self._norms) == len(self._layers) + 1
        self.head = head

    @classmethod
    def load(
        cls,
        source: Path | WeightSource,
        config: ModelConfig,
        ops: Ops,
        planner: LinearPlanner,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_positions: int | None = None,
        exact: bool | None = None,
        kind: str = DENSE,
        num_columns: int | None = None,
    ) -> Decoder:
        """Read the weights from a folder or any source; call `planner.certify()` once after the last load.

        max_positions: length of the rotary table, by default the config's; it may be longer. exact: None: the
        planner's setting, False for draft models; kind: see `LayerBuilder`. num_columns: outputs of an untied
        head with a reduced vocabulary. Raises ValueError for tensors missing, misshapen or left over.
        """
        weights = Weights.open(source) if isinstance(source, Path) else source
        builder = LayerBuilder(weights, ops, planner, device, dtype, exact, kind)
        root = root_of(weights)
        length = max_positions or config.max_position_embeddings
        vocab_size = config.vocab_size
        hidden = config.hidden_size
        embed_VH = builder.tensor(f"{root}embed_tokens.weight", (vocab_size, hidden))
        if not config.caches:
            raise ValueError(
                f"num_kv_shared_layers={config.num_layers} of as many layers: this model borrows all keys and values, "
                "so it only drafts for another; give it as speculative_config['model']"
            )
        tables = rope_tables(config, length, device)
        layers = load_layers(builder, f"{root}layers.", config, tables)
        inputs = None
        if config.layers[0].input_size:
            takers = [layer for layer in layers if isinstance(layer, SandwichLayer)]
            inputs = LayerInputs(builder, root, config.layers[0], (vocab_size, hidden), takers)
        final_norm = builder.norm(f"{root}norm", hidden, config.norm_eps, config.norm_offset)
        if config.tie_word_embeddings:
            head = builder.pack(embed_VH, out_dtype=torch.float32, kept=True)
        else:
            head = builder.linear(
                head_of(weights), hidden, num_columns or vocab_size, out_dtype=torch.float32
            )
        if isinstance(weights, Weights):
            _check_leftovers(weights, root, config)
        return cls(config, embed_VH, layers, final_norm, head, tables, ops, inputs)

    def embed(self, tokens_T: Tensor) -> Tensor:
        """int64 ids in 0..V-1 -> [T, H]."""
        embedded_TH = self._gather(self.embed_VH, tokens_T)
        return embedded_TH if self._embed_scale == 1.0 else embedded_TH * self._embed_scale

    def __call__(
        self,
        tokens_T: Tensor,
        attn: PagedAttention,
        taps: Sequence[int] = (),
        final: bool = False,
        given: GivenEmbeddings | None = None,
        only_M: Tensor | None = None,
    ) -> TargetOutput:
        """One pass over rows of any requests; their keys and values are stored.

        taps: tap i is the stream entering layer i (0 the embeddings, num_layers the last layer's output); final: also
        return the state after the final norm, as the last tap; given: embeddings that rows carry in place of their
        tokens'; only_M: the rows whose states are wanted, if `leaves_rows`: for other rows the last layer only stores
        keys and values. ValueError if a tap is out of range.
        """
        if taps:
            self.check_taps(taps)
        assert only_M is None or (self.leaves_rows and not final and len(self._layers) not in taps)
        residual_TH = self.embed(tokens_T)
        if given is not None:
            residual_TH = given.over(residual_TH)
        stream = [residual_TH]
        x_TH = self._norms[0](residual_TH)
        layers: Sequence[LayerFn] = self._layers
        if self._layer_inputs is not None:
            own_T = tokens_T if given is None else given.replaced(tokens_T, self.config.blank_id)
            layers = self._layer_inputs(own_T, residual_TH)
        for i, layer in enumerate(layers):
            if only_M is not None and layer is layers[-1]:
                attn = attn.only(only_M)
                residual_TH = attn.attending(residual_TH)
            x_TH, residual_TH = layer(x_TH, residual_TH, attn)
            x_TH, residual_TH = self._norms[i + 1].add(x_TH, residual_TH)
            tapped_TH = residual_TH
            if given is not None and (adding := given.adding(i, residual_TH)) is not None:
                is_given_T1, residual_TH = adding
                x_TH = torch.where(is_given_T1, self._norms[i + 1](residual_TH), x_TH)
                tapped_TH = residual_TH if given.added.in_taps else tapped_TH
            if taps:
                stream.append(tapped_TH)
        tapped = tuple(stream[i] for i in taps)
        return TargetOutput(x_TH, (*tapped, x_TH) if final else tapped)

    @property
    def leaves_rows(self) -> bool:
        """Whether a pass may skip rows in the last layer."""
        return self._layer_inputs is None and self.config.layers[-1].mixer.leaves_rows

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raise ValueError if a tapped id is out of range."""
        last = len(self._layers)
        wrong = [i for i in taps if not 0 <= i <= last]
        if wrong:
            raise ValueError(
                f"tapped layer id {wrong[0]} of {list(taps)} is out of range: this model has num_layers={last}, so ids "
                f"run from 0 to {last}; is the drafter one for another model?"
            )

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """States after the final norm -> fp32 [M, V]."""
        logits_MV = self.head(hidden_MH)
        return self._soft_cap(logits_MV, self._cap) if self._cap else logits_MV


def _check_leftovers(weights: Weights, root: str, config: ModelConfig) -> None:
    """Raise ValueError for an unused tensor of the layers or the head, such as a bias that the config excludes.

    Layers past the last are ignored: they are a draft head in the model's files.
    """
    layer = re.compile(re.escape(root) + r"layers\.(\d+)\.")

    def own(name: str) -> bool:
        match = layer.match(name)
        if match:
            return int(match[1]) < config.num_layers
        ends = (
            root + "norm.",
            root + "embed_tokens",
            root + "per_layer_",
            "lm_head.",
            "language_model.lm_head.",
        )
        return name.startswith(ends)

    unread = [
        re.escape(f"{root}layers.{i}.") + pattern
        for i, layer in enumerate(config.layers)
        for pattern in layer.mixer.unread
    ]
    tied = [r"lm_head\.weight"] if config.tie_word_embeddings else []
    weights.check_used(own, [r".*rotary_emb\.inv_freq", *tied, *unread])
