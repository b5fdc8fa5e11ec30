"""A model's constants, read from its config.json: every key is understood, known to be harmless, or refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof import schema
from draftproof.models.families import FAMILIES, Family
from draftproof.models.gemma_config import NESTED_KEYS, GemmaConfig, check_layer_types, read_gemma
from draftproof.models.mla import MlaConfig, parse_mla
from draftproof.models.moe_config import MoEConfig, parse_moe
from draftproof.models.rope import RopeConfig, parse_rope
from draftproof.schema import flag, whole, words

_COMMON_KEYS = words(
    """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim rms_norm_eps rope_parameters rope_theta rope_scaling partial_rotary_factor max_position_embeddings
    tie_word_embeddings eos_token_id bos_token_id dtype torch_dtype"""
)

# Bookkeeping, training and text-generation settings: whatever their value, logits do not change.
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
    num_nextn_predict_layers"""
)

# Keys whose other values would change the arithmetic, with the values that leave it alone.
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

# Why model types that begin so are refused, where the name alone would suggest that they are like another.
_OTHER_LAYERS: Mapping[str, str] = {
    "qwen3_next": "has layers of linear attention",
    "qwen3_5": "has layers of linear attention",
    "qwen3_vl": "reads images",
    "qwen2_vl": "reads images",
    "qwen2_5_vl": "reads images",
    "minimax": "has layers of linear attention",
    "kimi_linear": "has layers of linear attention",
    "deepseek_v32": "has sparse attention with an indexer",
    "mamba": "has Mamba layers",
    "falcon_h1": "has Mamba layers",
    "mimo_v2": "has attention sinks and heads of several sizes",
}

_REFUSED_KEYS: Mapping[str, str] = {
    "quantization_config": "quantised checkpoints are not supported; use the unquantised one",
    "compression_config": "compressed checkpoints are not supported; use the uncompressed one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The constants of one decoder. Sizes are numbers of elements; `windows[i]` is layer i's, 0 = sees all positions.

    `dtype` is what the files say the weights are in, None where they do not say.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    windows: tuple[int, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gemma: GemmaConfig | None = None
    mla: MlaConfig | None = None
    moe: MoEConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


@contextlib.contextmanager
def reading(where: object) -> Iterator[None]:
    """A context for reading a config: values of a type nobody thought of end as a ValueError that names the file."""
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


def read_raw(directory: Path, overrides: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """(config.json of `directory`, what errors call it). Keys of `overrides` replace the file's, objects are merged."""
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
    """The config of a language model from the file's content; ValueError too where `architectures` names none."""
    with reading(where):
        config = parse(raw, families, where=where, extra=extra)
    known = families[config.model_type].architectures
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

    where: how error messages call the source. extra: keys that the caller understands and handles itself. Raises
    ValueError for unknown model types and for keys that may change the arithmetic in a way not implemented here.
    """
    family = _family(raw, families, where)
    if family.gemma and "text_config" in raw:
        check_keys(raw, where, NESTED_KEYS | set(extra))
    raw, gemma = read_gemma(raw, family.gemma, where) if family.gemma else (raw, None)
    beside = gemma.moe if gemma is not None else None
    _check_family_keys(raw, family, where, extra)
    hidden = whole(raw, "hidden_size", where)
    heads = whole(raw, "num_attention_heads", where)
    kv_heads = whole(raw, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads={heads}: must be a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = _head_dim(raw, family, hidden, heads, where)
    num_layers = whole(raw, "num_hidden_layers", where)
    max_positions = whole(raw, "max_position_embeddings", where)
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=whole(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=whole(raw, "intermediate_size", where),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=schema.number(raw, "rms_norm_eps", where, default=1e-6),
        rope=parse_rope(raw, head_dim, max_positions, where, family.default_theta, family.default_rotary),
        max_position_embeddings=max_positions,
        windows=_windows(raw, family, num_layers, where),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", where),
        qkv_bias=_switch(raw, family.qkv_bias, where),
        o_bias=_switch(raw, family.o_bias, where),
        mlp_bias=_switch(raw, family.mlp_bias, where),
        qk_norm=_switch(raw, family.qk_norm, where),
        mla=parse_mla(raw, where) if family.mla else None,
        moe=parse_moe(raw, family.moe, num_layers, where) if family.moe else beside,
        gemma=gemma,
        eos_token_ids=schema.token_ids(raw.get("eos_token_id"), f"{where}: eos_token_id"),
        dtype=_dtype(raw, where),
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


def check_keys(raw: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    """ValueError for a key, beside those of the layers, that is neither known nor bookkeeping."""
    _dtype(raw, where)
    flag(raw, "tie_word_embeddings", where)
    for key, value in raw.items():
        if key in _HARMLESS_KEYS or key in known or value is None:
            continue
        if value in _NEUTRAL_VALUES.get(key, ()):
            continue
        if key in _REFUSED_KEYS:
            raise ValueError(f"{where}: {key!r} is set: {_REFUSED_KEYS[key]}")
        raise schema.unknown_key(key, value, where, known)


def _check_family_keys(raw: Mapping[str, Any], family: Family, where: str, extra: Collection[str]) -> None:
    understood = _COMMON_KEYS | family.keys | _HARMLESS_KEYS | set(extra)
    for key, value in raw.items():
        if key in understood or value is None:
            continue
        if key in _REFUSED_KEYS:
            raise ValueError(f"{where}: {key!r} is set: {_REFUSED_KEYS[key]}")
        if key not in _NEUTRAL_VALUES:
            raise schema.unknown_key(key, value, where, {*_COMMON_KEYS, *family.keys, *_NEUTRAL_VALUES})
        if value not in _NEUTRAL_VALUES[key]:
            allowed = " or ".join(repr(v) for v in _NEUTRAL_VALUES[key])
            raise ValueError(
                f"{where}: {key}={schema.shown(value)}: not supported for model_type {family.model_type!r}, only "
                f"{allowed}"
            )


def _switch(raw: Mapping[str, Any], switch: bool | str, where: str) -> bool:
    return flag(raw, switch, where) if isinstance(switch, str) else switch


def _head_dim(raw: Mapping[str, Any], family: Family, hidden: int, heads: int, where: str) -> int:
    if family.mla:  # what rotates
        return _even(raw, "qk_rope_head_dim", where)
    default = family.default_head_dim if "head_dim" not in raw else None
    if raw.get("head_dim") is None and default is None and hidden % heads:
        raise ValueError(
            f"{where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}, and head_dim is missing: "
            "add it"
        )
    return _even(raw, "head_dim", where, default or hidden // heads)


def _even(raw: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    size = whole(raw, key, where, default=default)
    if size % 2:
        raise ValueError(f"{where}: {key}={size}: must be even, rotary embedding turns pairs")
    return size


def _windows(raw: Mapping[str, Any], family: Family, num_layers: int, where: str) -> tuple[int, ...]:
    """Each layer's window, 0 = none; what the keys mean is the family's business (`families.Windows`)."""
    for key in ("sliding_window", "max_window_layers"):  # in force or not
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


def _dtype(raw: Mapping[str, Any], where: str) -> torch.dtype | None:
    name = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    if name is None:
        return None
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = known.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise schema.no_such_choice(f"{where}: dtype", name, known)
    return dtype
