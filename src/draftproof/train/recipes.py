"""Kinds of heads: how each is made for a target with the `speculators` library, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.ffns.dense import DenseConfig
from draftproof.models.mixers.attention import AttentionConfig
from draftproof.train import attention
from draftproof.train.settings import HeadConfig

DRAFT_VOCAB = 8192
SLIDING_WINDOW = 256
_EMBEDDING = "embed_tokens."
_OUTPUT = ("lm_head.", "verifier_")
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a head. `name`: what the head's config calls it."""

    directory: Path
    model: ModelConfig
    name: str

    @property
    def record(self) -> dict[str, Any]:
        """The properties of the target that a head depends on."""
        m = self.model
        return {
            "name": self.name,
            "hidden_size": m.hidden_size,
            "num_layers": m.num_layers,
            "vocab_size": m.vocab_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one kind of head is made and trained.

    `make`: makes the library's model, given the draft vocabulary's maps and the mask token. `taps`: the layers whose
    states it reads. `preprocess`: applied to each text before packing. `call`: arguments of the forward pass.
    `num_dropped`: tokens that `preprocess` removes from a text; None unless the head attends text by text. `shared`:
    prefixes of names of tensors that are the target's and not saved.
    """

    make: Callable[..., Any]
    taps: list[int]
    draft_vocab_size: int
    call: Mapping[str, Any]
    preprocess: Callable[[Any], Any] | None = None
    num_dropped: int | None = None
    shared: tuple[str, ...] = (_EMBEDDING, *_OUTPUT)


def recipe(config: HeadConfig, target: Target) -> Recipe:
    return _RECIPES[config.method](config, target)


def tapped_layers(num_layers: int) -> list[int]:
    """The layers whose states are recorded: an early, a middle and a late one, and the last."""
    taps = [2, num_layers // 2, num_layers - 2, num_layers]
    if sorted(set(taps)) != taps:
        raise ValueError(
            f"num_hidden_layers={num_layers}: heads tap three layers between 2 and the last; take a "
            "target of 7 layers or more"
        )
    return taps


def is_plain(model: ModelConfig) -> bool:
    """Whether all layers are like those of Llama and Qwen, for which the library can make heads."""
    return all(
        isinstance(layer.mixer, AttentionConfig)
        and isinstance(layer.ffn, DenseConfig)
        and layer.norms.style == "pre"
        for layer in model.layers
    )


def _eagle3(config: HeadConfig, target: Target) -> Recipe:
    from draftproof.train import library

    *taps, _ = tapped_layers(target.model.num_layers)
    attention.register()

    def make(**vocabulary: Any) -> Any:
        return library.Eagle3DraftModel.from_training_args(
            verifier_config=_layers("llama", config.num_layers or 1, config, target),
            verifier_name_or_path=str(target.directory),
            target_layer_ids=taps,
            norm_before_residual=True,
            fc_norm=True,  # states of late layers are far larger
            ttt_steps=config.num_drafts,
            draft_attn_impl=attention.NAME,
            **vocabulary,
        )

    return Recipe(
        make=make,
        taps=taps,
        draft_vocab_size=_draft_vocab_size(config, target),
        call={
            "ttt_steps": config.num_drafts,
            "ttt_step_loss_decay": config.loss_decay,
            "loss_config": library.resolve_loss_config("kl_div", "eager"),
        },
        preprocess=library.shift_batch,
        num_dropped=1,
    )


def _peagle(config: HeadConfig, target: Target) -> Recipe:
    """An EAGLE-3 head that drafts in parallel with mask rows. The mask's state and token embedding are trained with the
    head: no text has such a state, and the target's embedding is that of a token that texts hardly contain."""
    from draftproof.train import library

    *taps, _ = tapped_layers(target.model.num_layers)

    def make(**vocabulary: Any) -> Any:
        return library.PEagleDraftModel.from_training_args(
            verifier_config=_layers("llama", config.num_layers or 1, config, target),
            verifier_name_or_path=str(target.directory),
            target_layer_ids=taps,
            norm_before_residual=True,
            fc_norm=True,
            num_depths=config.num_drafts,
            draft_attn_impl="sdpa",
            **vocabulary,
        )

    return Recipe(
        make=make,
        taps=taps,
        draft_vocab_size=_draft_vocab_size(config, target),
        call={
            "num_depths": config.num_drafts,
            "loss_config": library.resolve_loss_config("kl_div", "eager"),
        },
        preprocess=library.shift_batch,
        shared=_OUTPUT,
    )


def _mtp(config: HeadConfig, target: Target) -> Recipe:
    """An MTP module: one layer over the last state. Made by its class, with random weights; the library's own factory
    would start from modules of the target."""
    from draftproof.train import library

    m = target.model

    def make(**unused: Any) -> Any:
        """The module; its layer config is that of all the target's layers, since the module is one more of these."""
        drafts = library.GreedyTokenProposalConfig(speculative_tokens=config.num_drafts)
        model = library.MTPDraftModel(
            library.MTPSpeculatorConfig(
                transformer_layer_config=_layers("qwen3", m.num_layers, config, target),
                speculators_config=library.SpeculatorsConfig(
                    algorithm="mtp",
                    proposal_methods=[drafts],
                    default_proposal_method="greedy",
                    verifier=library.VerifierConfig.from_pretrained(str(target.directory)),
                ),
            )
        )
        model.load_verifier_weights()
        return model

    return Recipe(
        make=make,
        taps=[m.num_layers],
        draft_vocab_size=m.vocab_size,
        call={"step_weights": library.compute_step_weights(config.loss_decay, config.num_drafts)},
        preprocess=_without_targets,
    )


def _without_targets(batch: Batch) -> Batch:
    """The batch without the target's last states, so that the loss is against its tokens."""
    return {key: value for key, value in batch.items() if key != "verifier_last_hidden_states"}


def _dflash(config: HeadConfig, target: Target) -> Recipe:
    from draftproof.train import library

    early, middle, _, last = tapped_layers(target.model.num_layers)
    taps = [early, middle, last]
    num_layers = config.num_layers or 2
    kinds = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]

    def make(**vocabulary: Any) -> Any:
        return library.DFlashDraftModel.from_training_args(
            verifier_config=_layers(
                "qwen3",
                num_layers,
                config,
                target,
                layer_types=kinds,
                sliding_window=SLIDING_WINDOW,
                use_sliding_window=True,
            ),
            verifier_name_or_path=str(target.directory),
            target_layer_ids=taps,
            block_size=config.num_drafts + 1,
            draft_attn_impl="sdpa",
            **vocabulary,
        )

    return Recipe(
        make=make,
        taps=taps,
        draft_vocab_size=_draft_vocab_size(config, target),
        call={
            "max_anchors": max(1, config.tokens_per_step // 8),
            "loss_config": library.resolve_loss_config("ce", "eager"),
            "per_position_loss_weight": "dpace",
        },
    )


def _draft_vocab_size(config: HeadConfig, target: Target) -> int:
    return min(config.draft_vocab_size or DRAFT_VOCAB, target.model.vocab_size)


def _layers(kind: str, num_layers: int, config: HeadConfig, target: Target, **more: Any) -> Any:
    """The library's config for the head's layers, with the target's sizes."""
    from transformers import LlamaConfig, Qwen3Config

    m = target.model
    mixer, ffn = m.layers[0].mixer, m.layers[0].ffn
    assert isinstance(mixer, AttentionConfig) and isinstance(ffn, DenseConfig), "asked before, by `is_plain`"
    made = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        num_hidden_layers=num_layers,
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=config.intermediate_size or ffn.width,
        num_attention_heads=mixer.num_heads,
        num_key_value_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        max_position_embeddings=m.max_position_embeddings,
        rms_norm_eps=m.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": mixer.rope.theta},
        tie_word_embeddings=False,
        **more,
    )
    made._attn_implementation = "sdpa"
    return made


_RECIPES: Mapping[str, Callable[[HeadConfig, Target], Recipe]] = {
    "eagle3": _eagle3,
    "peagle": _peagle,
    "mtp": _mtp,
    "dflash": _dflash,
}
