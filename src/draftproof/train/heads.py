"""A head in training: the `speculators` library's model, its batches, and the checkpoint that the engine reads.

The library's model classes, collation and losses are used. Its trainer is not: it needs samples from the library's own
data pipeline (with vLLM), counts in epochs and pickles optimizers.
Shapes: D draft vocabulary, V vocabulary, T tokens of a text, S tapped layers, H hidden size.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftproof.schema import words
from draftproof.train import recipes
from draftproof.train.attention import Places
from draftproof.train.recipes import Target
from draftproof.train.settings import HeadConfig


class TrainedHead:
    """A head in training. `model`: the library's; the target's weights in it are frozen. `parameters`: the trainable
    ones, by name."""

    def __init__(
        self, config: HeadConfig, target: Target, frequencies_V: Tensor, device: torch.device
    ) -> None:
        torch.manual_seed(config.train_seed)
        self.config, self.target, self.device = config, target, device
        self._recipe = recipes.recipe(config, target)
        size = self._recipe.draft_vocab_size
        maps = (
            _vocabulary(frequencies_V, size) if size < target.model.vocab_size else {"t2d": None, "d2t": None}
        )
        mask_token = int(frequencies_V.argmin())  # the rarest token
        self.model = self._recipe.make(draft_vocab_size=size, mask_token_id=mask_token, **maps).to(device)
        self.model.train()
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def losses(
        self, tokens: Sequence[Tensor], states: Sequence[Tensor], taps: Sequence[int]
    ) -> tuple[Tensor, Any]:
        """Loss and metrics of some texts, packed into one row of `tokens_per_step`."""
        from draftproof.train.library import CollateFn

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
        # compiling would make steps faster, but the first one would take a minute for each kind of head
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
        mask_T[: self.config.num_drafts + 1] = 0  # the previous text's drafts reach into these rows
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
        """Write the head as the engine reads it: in bf16, without tensors that it shares with its target."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads(self.model.config.to_json_string(use_diff=False))
        raw = {key: config[key] for key in sorted(_KEPT) if key in config}
        raw["transformer_layer_config"] = _plain(raw["transformer_layer_config"])
        raw["speculators_config"]["verifier"]["name_or_path"] = self.target.name
        raw |= {"architectures": [type(self.model).__name__], "dtype": "bfloat16"}
        tensors = {
            name: (t.to(torch.bfloat16) if t.is_floating_point() else t).detach().cpu().contiguous()
            for name, t in self.model.state_dict().items()
            if not name.startswith(self._recipe.shared)
        }
        partial = folder / "model.safetensors.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        partial.replace(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def check_installed() -> None:
    """ValueError if the library is missing."""
    try:
        importlib.import_module("draftproof.train.library")
    except ImportError as error:
        raise ValueError(
            f"training needs the speculators library ({error}): pip install 'draftproof[train]'"
        ) from error


def _vocabulary(frequencies_V: Tensor, size: int) -> dict[str, Tensor]:
    """The library's maps between the target's vocabulary and the `size` most frequent tokens."""
    from draftproof.train.library import build_vocab_mappings_from_distribution

    counts = dict(enumerate(frequencies_V.tolist()))
    d2t, t2d = build_vocab_mappings_from_distribution(counts, size, len(frequencies_V))
    return {"d2t": d2t, "t2d": t2d}


def _plain(layers: dict[str, Any]) -> dict[str, Any]:
    """The layers' config without private keys and None values."""
    return {key: value for key, value in layers.items() if value is not None and not key.startswith("_")}


_KEPT = words(
    """speculators_model_type speculators_version speculators_config transformer_layer_config draft_vocab_size
    tie_word_embeddings eagle_aux_hidden_state_layer_ids norm_before_residual norm_before_fc fc_norm norm_output
    aux_hidden_state_layer_ids block_size mask_token_id sample_from_anchor sliding_window_non_causal
    num_nextn_predict_layers"""
)
