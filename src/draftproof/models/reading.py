"""Reads a config.json for families, mixers and feed-forward parts, and checks its keys.

Every key is understood, known to be harmless, or refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from draftproof import schema
from draftproof.models.families import Family
from draftproof.schema import flag, whole, words

_COMMON_KEYS = words(
    """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim rms_norm_eps rope_parameters rope_theta rope_scaling partial_rotary_factor max_position_embeddings
    tie_word_embeddings eos_token_id bos_token_id dtype torch_dtype"""
)

# Bookkeeping, training and text-generation settings, which never change logits.
_HARMLESS_KEYS = words(
    """architectures auto_map transformers_version _name_or_path _model_name_or_path name_or_path _commit_hash
    _experts_implementation experts_implementation _attn_implementation attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled use_cache use_bfloat16 torchscript tf_legacy_loss
    return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    keys_to_ignore_at_inference initializer_range attention_dropout hidden_dropout resid_dropout embd_pdrop
    resid_pdrop attn_pdrop gradient_checkpointing remove_invalid_values tokenizer_class pad_token_id sep_token_id
    unk_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens bad_words_ids id2label label2id num_labels problem_type finetuning_task
    task_specific_params prefix max_length min_length max_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size exponential_decay_length_penalty num_return_sequences
    chunk_size_feed_forward is_decoder is_llama_config unsloth_version unsloth_fixed model_name
    num_nextn_predict_layers mtp_num_hidden_layers"""
)

# Keys that are accepted only with these values: others would change the arithmetic.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (0, 1),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}

_REFUSED_KEYS: Mapping[str, str] = {
    "quantization_config": "quantised checkpoints are not supported; use the unquantised one",
    "compression_config": "compressed checkpoints are not supported; use the uncompressed one",
}


KINDS = ("sliding_attention", "full_attention")  # values of `layer_types`


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The content of a config.json; the family says what keys mean. Errors are ValueErrors with file, key and fix."""

    raw: Mapping[str, Any]
    family: Family
    where: str

    def whole(self, key: str) -> int:
        return whole(self.raw, key, self.where)

    @property
    def num_layers(self) -> int:
        return self.whole("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        return self.whole("hidden_size")

    @property
    def max_positions(self) -> int:
        return self.whole("max_position_embeddings")

    @property
    def num_heads(self) -> int:
        return self.whole("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        heads = self.num_heads
        kv_heads = whole(self.raw, "num_key_value_heads", self.where, default=heads)
        if heads % kv_heads:
            raise ValueError(
                f"{self.where}: num_attention_heads={heads}: must be a multiple of num_key_value_heads={kv_heads}"
            )
        return kv_heads

    @property
    def head_dim(self) -> int:
        """Head size; must be even, as rotary embedding rotates pairs."""
        hidden, heads = self.hidden_size, self.num_heads
        default = self.family.default_head_dim if "head_dim" not in self.raw else None
        if self.raw.get("head_dim") is None and default is None and hidden % heads:
            raise ValueError(
                f"{self.where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}, and head_dim is "
                "missing: add it"
            )
        return self.even("head_dim", default or hidden // heads)

    @property
    def windows(self) -> tuple[int, ...]:
        """Each layer's window, 0 = none; the family says what the keys mean (`families.Windows`)."""
        return _windows(self.raw, self.family, self.num_layers, self.where)

    def switch(self, switch: bool | str) -> bool:
        """Value of a family's switch: a constant, or the config key that turns it on."""
        return flag(self.raw, switch, self.where) if isinstance(switch, str) else switch

    def even(self, key: str, default: int | None = None) -> int:
        """An even size, as rotary embedding rotates pairs."""
        size = whole(self.raw, key, self.where, default=default)
        if size % 2:
            raise ValueError(f"{self.where}: {key}={size}: must be even, rotary embedding turns pairs")
        return size


def check_keys(raw: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    """Raise ValueError for a key outside the layers' config that is neither known nor bookkeeping."""
    stored_dtype(raw, where)
    flag(raw, "tie_word_embeddings", where)
    for key, value in raw.items():
        if key in _HARMLESS_KEYS or key in known or value is None:
            continue
        if value in _NEUTRAL_VALUES.get(key, ()):
            continue
        if key in _REFUSED_KEYS:
            raise ValueError(f"{where}: {key!r} is set: {_REFUSED_KEYS[key]}")
        raise schema.unknown_key(key, value, where, known)


def check_family_keys(given: Given, own: Collection[str], extra: Collection[str]) -> None:
    """Raise ValueError for a key that may change the arithmetic in a way not implemented here. own: this family's keys;
    extra: keys that the caller handles."""
    raw, family, where = given.raw, given.family, given.where
    understood = {*_COMMON_KEYS, *own, *_HARMLESS_KEYS, *extra}
    for key, value in raw.items():
        if key in understood or value is None:
            continue
        if key in _REFUSED_KEYS:
            raise ValueError(f"{where}: {key!r} is set: {_REFUSED_KEYS[key]}")
        if key not in _NEUTRAL_VALUES:
            raise schema.unknown_key(key, value, where, {*_COMMON_KEYS, *own, *_NEUTRAL_VALUES})
        if value not in _NEUTRAL_VALUES[key]:
            allowed = " or ".join(repr(v) for v in _NEUTRAL_VALUES[key])
            raise ValueError(
                f"{where}: {key}={schema.shown(value)}: not supported for model_type {family.model_type!r}, only "
                f"{allowed}"
            )


def check_layer_types(types: object, num_layers: int, where: str) -> None:
    """Raise ValueError if `layer_types` is not a list with a known kind per layer."""
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in KINDS for kind in types):
        other = next((kind for kind in types if kind not in KINDS), None) if isinstance(types, list) else None
        hint = "" if other is None else f"; {schema.shown(other)} is not supported"
        raise ValueError(
            f"{where}: layer_types={schema.shown(types)}: must be a list of num_hidden_layers={num_layers} entries, "
            f"each 'full_attention' or 'sliding_attention'{hint}"
        )


def _windows(raw: Mapping[str, Any], family: Family, num_layers: int, where: str) -> tuple[int, ...]:
    for key in ("sliding_window", "max_window_layers"):  # checked even if not used
        if raw.get(key) is not None:
            whole(raw, key, where, 0)
    size = raw.get("sliding_window", family.default_window)
    if family.windows == "never":
        return (0,) * num_layers
    if family.windows == "switched" and not flag(raw, "use_sliding_window", where):
        size = None
    types = raw.get("layer_types")
    if types is None:
        if size is None:
            return (0,) * num_layers
        if family.windows == "per_layer":
            raise ValueError(
                f"{where}: sliding_window={schema.shown(size)} without 'layer_types': add layer_types, one of "
                "'sliding_attention' and 'full_attention' for each layer, or set sliding_window to null"
            )
        switched = family.windows == "switched"
        first = whole(raw, "max_window_layers", where, 0, default=28) if switched else 0
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    check_layer_types(types, num_layers, where)
    slides = [kind == "sliding_attention" for kind in types]
    if family.windows == "every" and size is not None and not all(slides):
        raise ValueError(
            f"{where}: layer_types={schema.shown(types)}: in this family sliding_window={schema.shown(size)} holds for "
            f"every layer; {schema.without('layer_types')}"
        )
    if not any(slides):
        return (0,) * num_layers
    if size is None:
        switch = " and use_sliding_window to true" if family.windows == "switched" else ""
        raise ValueError(
            f"{where}: layer_types has sliding layers, but the window in force is None: set sliding_window to an "
            f"integer of at least 1{switch}"
        )
    window = whole({"sliding_window": size}, "sliding_window", where)
    return tuple(window if slide else 0 for slide in slides)


def stored_dtype(raw: Mapping[str, Any], where: str) -> torch.dtype | None:
    """The weights' dtype according to the config; None if it does not say."""
    name = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    if name is None:
        return None
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = known.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise schema.no_such_choice(f"{where}: dtype", name, known)
    return dtype
