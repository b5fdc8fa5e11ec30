"""Heads as the `speculators` library has them: built for a target, given batches, written as our engine reads them.

The library's model classes, collation and losses are used; its trainer is not: it reads samples that its own data
pipeline prepared with vLLM, counts in epochs and keeps optimizers as pickles.
Shapes: D draft vocabulary, V vocabulary, T tokens of a text, S tapped layers, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.ffns.dense import DenseConfig
from draftproof.models.mixers.attention import AttentionConfig
from draftproof.schema import words
from draftproof.train import attention
from draftproof.train.attention import Places
from draftproof.train.settings import HeadConfig

DRAFT_VOCAB = 8192
SLIDING_WINDOW = 256
_TARGETS = (
    "embed_tokens.",
    "lm_head.",
    "verifier_",
)  # beginnings of tensors that are the target's: shared, not saved


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a head. `name`: as the head's config names it."""

    directory: Path
    model: ModelConfig
    name: str

    @property
    def record(self) -> dict[str, Any]:
        """What a head must fit."""
        m = self.model
        return {
            "name": self.name,
            "hidden_size": m.hidden_size,
            "num_layers": m.num_layers,
            "vocab_size": m.vocab_size,
        }


def tapped_layers(num_layers: int) -> list[int]:
    """The layers whose states are recorded: an early, a middle and a late one, and the last state of all."""
    taps = [2, num_layers // 2, num_layers - 2, num_layers]
    if sorted(set(taps)) != taps:
        raise ValueError(
            f"num_hidden_layers={num_layers}: heads tap three layers between 2 and the last; take a "
            "target of 7 layers or more"
        )
    return taps


class TrainedHead:
    """A head in training. `model`: the library's; its target's weights do not learn."""

    def __init__(
        self, config: HeadConfig, target: Target, frequencies_V: Tensor, device: torch.device
    ) -> None:
        torch.manual_seed(config.train_seed)
        self.config, self.target, self.device = config, target, device
        self._recipe = _RECIPES[config.method](config, target)
        size = draft_vocab_size(config, target)
        maps = (
            _vocabulary(frequencies_V, size) if size < target.model.vocab_size else {"t2d": None, "d2t": None}
        )
        mask_token = int(frequencies_V.argmin())  # texts hardly have it
        self.model = self._recipe.make(draft_vocab_size=size, mask_token_id=mask_token, **maps).to(device)
        self.model.train()
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def losses(
        self, tokens: Sequence[Tensor], states: Sequence[Tensor], taps: Sequence[int]
    ) -> tuple[Tensor, Any]:
        """Loss and metrics of some texts, packed into one row of `tokens_per_step`."""
        from speculators.train.data import CollateFn

        size = self.target.model.hidden_size
        columns = [list(taps).index(tap) for tap in self._recipe.taps]
        last = list(taps).index(self.target.model.num_layers)
        collate = CollateFn(
            max_len=self.config.tokens_per_step,
            hidden_size=size,
            num_target_layers=len(columns),
            dtype=torch.float32,
            preprocess=self._recipe.preprocess,
        )
        batch = collate([self._sample(t, s, columns, last) for t, s in zip(tokens, states, strict=True)])
        given: dict[str, Any] = {k: v.to(self.device) for k, v in batch.items() if isinstance(v, Tensor)}
        if self._recipe.num_dropped is not None:
            lengths = [len(t) - self._recipe.num_dropped for t in tokens]
            given["places"] = Places.of(lengths, self.config.tokens_per_step, self.device)
        # compiled, a step would be faster, and the first one would take a minute for each kind of head
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"),
        ):
            _, loss, metrics = self.model(**given, **self._recipe.call)
        return loss, metrics

    def _sample(
        self, tokens_T: Tensor, states_TSH: Tensor, columns: list[int], last: int
    ) -> dict[str, Tensor]:
        num, device = len(tokens_T), self.device
        states_TSH = states_TSH.to(device)
        mask_T = torch.ones(num, device=device)
        mask_T[:2] = 0
        given_TSH = states_TSH[:, columns]
        if self.model.training and self.config.state_noise:
            size_TS1 = given_TSH.float().square().mean(-1, keepdim=True).sqrt()
            given_TSH = given_TSH + self.config.state_noise * size_TS1 * torch.randn_like(given_TSH.float())
        return {
            "input_ids": tokens_T.to(device),
            "hidden_states": given_TSH.flatten(1),
            "verifier_last_hidden_states": states_TSH[:, last],
            "loss_mask": mask_T,
            "lengths": torch.tensor([num]),
            "position_ids": torch.arange(num, device=device),
        }

    def save(self, folder: Path) -> None:
        """The head as our engine reads it: bf16, without what it shares with its target."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads(self.model.config.to_json_string(use_diff=False))
        raw = {key: config[key] for key in sorted(_KEPT) if key in config}
        raw["transformer_layer_config"] = _plain(raw["transformer_layer_config"])
        raw["speculators_config"]["verifier"]["name_or_path"] = self.target.name
        raw |= {"architectures": [type(self.model).__name__], "dtype": "bfloat16"}
        tensors = {
            name: (t.to(torch.bfloat16) if t.is_floating_point() else t).detach().cpu().contiguous()
            for name, t in self.model.state_dict().items()
            if not name.startswith(_TARGETS)
        }
        partial = folder / "model.safetensors.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        partial.replace(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def check_installed() -> None:
    """ValueError where the library is missing; it writes lines of its own, which are turned off."""
    try:
        import speculators
    except ImportError as error:
        raise ValueError(
            f"training needs the speculators library ({error}): pip install 'draftproof[train]'"
        ) from error
    from loguru import logger

    logger.disable(speculators.__name__)


def draft_vocab_size(config: HeadConfig, target: Target) -> int:
    return min(config.draft_vocab_size or DRAFT_VOCAB, target.model.vocab_size)


def _vocabulary(frequencies_V: Tensor, size: int) -> dict[str, Tensor]:
    """The maps between the target's vocabulary and its most frequent tokens."""
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = dict(enumerate(frequencies_V.tolist()))
    d2t, t2d = build_vocab_mappings_from_distribution(counts, size, len(frequencies_V))
    return {"d2t": d2t, "t2d": t2d}


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How one kind of head is made and trained. `call`: arguments of its forward pass."""

    make: Callable[..., Any]
    taps: list[int]
    preprocess: Callable[[Any], Any] | None
    call: Mapping[str, Any]
    num_dropped: int | None = None  # tokens of a text that its row lacks, where the head attends text by text


def _eagle3(config: HeadConfig, target: Target) -> _Recipe:
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch

    *taps, _ = tapped_layers(target.model.num_layers)
    attention.register()

    def make(**vocabulary: Any) -> Any:
        return Eagle3DraftModel.from_training_args(
            verifier_config=_layers("llama", config.num_layers or 1, config, target),
            verifier_name_or_path=str(target.directory),
            target_layer_ids=taps,
            norm_before_residual=True,
            fc_norm=True,  # states of late layers are larger by far
            ttt_steps=config.num_drafts,
            draft_attn_impl=attention.NAME,
            **vocabulary,
        )

    call = {
        "ttt_steps": config.num_drafts,
        "ttt_step_loss_decay": config.loss_decay,
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    return _Recipe(make, taps, shift_batch, call, num_dropped=1)


def _dflash(config: HeadConfig, target: Target) -> _Recipe:
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.core import DFlashDraftModel

    early, middle, _, last = tapped_layers(target.model.num_layers)
    taps = [early, middle, last]
    num_layers = config.num_layers or 2
    kinds = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]

    def make(**vocabulary: Any) -> Any:
        return DFlashDraftModel.from_training_args(
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

    call = {
        "max_anchors": max(1, config.tokens_per_step // 8),
        "loss_config": resolve_loss_config("ce", "eager"),
        "per_position_loss_weight": "dpace",
    }
    return _Recipe(make, taps, None, call)


def is_plain(model: ModelConfig) -> bool:
    """Whether its layers are those of Llama and Qwen, which the library makes heads of."""
    return all(
        isinstance(layer.mixer, AttentionConfig)
        and isinstance(layer.ffn, DenseConfig)
        and layer.norms.style == "pre"
        for layer in model.layers
    )


def _layers(kind: str, num_layers: int, config: HeadConfig, target: Target, **more: Any) -> Any:
    """The library's config of the head's layers: of the target's sizes."""
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


def _plain(layers: dict[str, Any]) -> dict[str, Any]:
    """The config of the layers without what says nothing about them."""
    return {key: value for key, value in layers.items() if value is not None and not key.startswith("_")}


_RECIPES: Mapping[str, Callable[[HeadConfig, Target], _Recipe]] = {"eagle3": _eagle3, "dflash": _dflash}
_KEPT = words(
    """speculators_model_type speculators_version speculators_config transformer_layer_config draft_vocab_size
    tie_word_embeddings eagle_aux_hidden_state_layer_ids norm_before_residual norm_before_fc fc_norm norm_output
    aux_hidden_state_layer_ids block_size mask_token_id sample_from_anchor sliding_window_non_causal"""
)
