"""What a model is, read from its config.json: every key is understood, known to be harmless, or refused by name."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof.models.families import FAMILIES, Family
from draftproof.models.gemma_config import GemmaConfig, read_gemma
from draftproof.models.mla import MlaConfig, parse_mla
from draftproof.models.moe_config import MoEConfig, parse_moe
from draftproof.models.rope import RopeConfig, parse_rope


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMMON_KEYS = _words(
    """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim rms_norm_eps rope_parameters rope_theta rope_scaling partial_rotary_factor max_position_embeddings
    tie_word_embeddings eos_token_id bos_token_id dtype torch_dtype"""
)

# Bookkeeping, training and text-generation settings: whatever their value, logits do not change.
_HARMLESS_KEYS = _words(
    """architectures auto_map transformers_version _name_or_path _commit_hash _attn_implementation attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled use_cache use_bfloat16 torchscript tf_legacy_loss return_dict
    return_dict_in_generate output_attentions output_hidden_states output_scores keys_to_ignore_at_inference
    initializer_range attention_dropout hidden_dropout resid_dropout embd_pdrop resid_pdrop attn_pdrop
    gradient_checkpointing remove_invalid_values tokenizer_class pad_token_id sep_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    bad_words_ids id2label label2id num_labels problem_type finetuning_task task_specific_params prefix
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size exponential_decay_length_penalty num_return_sequences chunk_size_feed_forward
    is_decoder is_llama_config unsloth_version unsloth_fixed model_name num_nextn_predict_layers"""
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
    bos_token_id: int | None = None
    dtype: torch.dtype | None = None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Values of a type nobody thought of end as a ValueError that names the file."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path}: a key holds something of the wrong type ({type(error).__name__}: {error}); correct the file or "
            "download it again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the file where it is missing or broken."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; point `model` at a folder in Hugging Face format") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); download the model again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(raw).__name__}")
    return raw


def read_config(
    directory: Path, families: Mapping[str, Family] = FAMILIES, *, extra: Collection[str] = ()
) -> ModelConfig:
    """The config of a language model in `directory`; extra as in `parse`. ValueError names the file, key and fix."""
    path = directory / "config.json"
    raw = read_json(path)
    with reading(path):
        config = parse(raw, families, where=str(path), extra=extra)
        known = families[config.model_type].architectures
        given = raw.get("architectures") or known
        fits = bool(set(given) & set(known))
    if not fits:
        raise ValueError(
            f"{path}: architectures={given!r}: not a language model of type {config.model_type!r}; "
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
    raw, gemma = read_gemma(raw, family.gemma, where) if family.gemma else (raw, None)
    beside = gemma.moe if gemma is not None else None
    _check_keys(raw, family, where, extra)
    hidden, heads = _count(raw, "hidden_size", where), _count(raw, "num_attention_heads", where)
    kv_heads = _count(raw, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads={heads}: must be a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = _head_dim(raw, family, hidden, heads, where)
    num_layers = _count(raw, "num_hidden_layers", where)
    max_positions = _count(raw, "max_position_embeddings", where)
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=_count(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size", where),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_norm_eps(raw, where),
        rope=parse_rope(raw, head_dim, max_positions, where, family.default_theta, family.default_rotary),
        max_position_embeddings=max_positions,
        windows=_windows(raw, family, num_layers, where),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", where),
        qkv_bias=_switch(raw, family.qkv_bias, where),
        o_bias=_switch(raw, family.o_bias, where),
        mlp_bias=_switch(raw, family.mlp_bias, where),
        qk_norm=_switch(raw, family.qk_norm, where),
        mla=parse_mla(raw, where) if family.mla else None,
        moe=parse_moe(raw, family.moe, num_layers, where) if family.moe else beside,
        gemma=gemma,
        eos_token_ids=token_ids(raw.get("eos_token_id"), f"{where}: eos_token_id"),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"), f"{where}: bos_token_id")), None),
        dtype=_dtype(raw, where),
    )


def _family(raw: Mapping[str, Any], families: Mapping[str, Family], where: str) -> Family:
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in families:
        return families[kind]
    known = f"supported: {', '.join(sorted(families))}"
    if kind is None:
        raise ValueError(f"{where}: no 'model_type', so this is no language model's config; {known}")
    near = difflib.get_close_matches(str(kind), list(families), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{where}: model_type={kind!r}: not supported; {hint}{known}")


def _check_keys(raw: Mapping[str, Any], family: Family, where: str, extra: Collection[str]) -> None:
    understood = _COMMON_KEYS | family.keys | _HARMLESS_KEYS | set(extra)
    for key, value in raw.items():
        if key in understood or value is None:
            continue
        if key in _REFUSED_KEYS:
            raise ValueError(f"{where}: {key!r} is set: {_REFUSED_KEYS[key]}")
        if key in _NEUTRAL_VALUES:
            if value not in _NEUTRAL_VALUES[key]:
                allowed = " or ".join(repr(v) for v in _NEUTRAL_VALUES[key])
                raise ValueError(
                    f"{where}: {key}={value!r}: not supported for model_type {family.model_type!r}, only {allowed}"
                )
            continue
        near = difflib.get_close_matches(key, [*_COMMON_KEYS, *family.keys, *_NEUTRAL_VALUES], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{where}: unknown key {key!r}={value!r}: {hint}It may change the model's arithmetic, which would make "
            "every result wrong; remove it from the file if it does not"
        )


def _count(raw: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{where}: {key} is missing: add it, as a whole number of at least 1")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {key}={value!r}: must be a whole number of at least 1")
    return value


def _flag(raw: Mapping[str, Any], key: str, where: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool) and value is not None:
        raise ValueError(f"{where}: {key}={value!r}: must be true or false")
    return bool(value)


def _switch(raw: Mapping[str, Any], switch: bool | str, where: str) -> bool:
    return _flag(raw, switch, where) if isinstance(switch, str) else switch


def _head_dim(raw: Mapping[str, Any], family: Family, hidden: int, heads: int, where: str) -> int:
    if family.mla:  # what rotates
        return _count(raw, "qk_rope_head_dim", where)
    default = family.default_head_dim if "head_dim" not in raw else None
    if raw.get("head_dim") is None and default is None and hidden % heads:
        raise ValueError(
            f"{where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}, and head_dim is missing: "
            "add it"
        )
    head_dim = _count(raw, "head_dim", where, default or hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim={head_dim}: must be even, rotary embedding turns pairs")
    return head_dim


def _norm_eps(raw: Mapping[str, Any], where: str) -> float:
    eps = raw.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or eps < 0:
        raise ValueError(f"{where}: rms_norm_eps={eps!r}: must be a number, 0 or greater")
    return float(eps)


def _windows(raw: Mapping[str, Any], family: Family, num_layers: int, where: str) -> tuple[int, ...]:
    """Each layer's window, 0 = none; what the keys mean is the family's business (`families.Windows`)."""
    size = raw.get("sliding_window", family.default_window)
    if family.windows == "never":
        return (0,) * num_layers
    if family.windows == "switched" and not _flag(raw, "use_sliding_window", where):
        size = None
    types = raw.get("layer_types")
    if types is None:
        if size is None:
            return (0,) * num_layers
        if family.windows == "per_layer":
            raise ValueError(
                f"{where}: sliding_window={size!r} without 'layer_types': add layer_types, one of "
                "'sliding_attention' and 'full_attention' for each layer, or set sliding_window to null"
            )
        first = raw.get("max_window_layers", 28) if family.windows == "switched" else 0
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{where}: layer_types={types!r}: must be a list of num_hidden_layers={num_layers} entries, each "
            "'full_attention' or 'sliding_attention'"
        )
    slides = [kind == "sliding_attention" for kind in types]
    if family.windows == "every" and size is not None and not all(slides):
        raise ValueError(
            f"{where}: layer_types={types!r}: in this family sliding_window={size!r} holds for every layer; remove "
            "layer_types"
        )
    if not any(slides):
        return (0,) * num_layers
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"{where}: layer_types has sliding layers, but the window in force is {size!r}: set sliding_window to a "
            "whole number of at least 1"
            + (" and use_sliding_window to true" if family.windows == "switched" else "")
        )
    return tuple(size if slide else 0 for slide in slides)


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Token ids from an int, a list of ints or null."""
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{name}={value!r}: must be a token id, a list of token ids, or null")
    return tuple(ids)


def _dtype(raw: Mapping[str, Any], where: str) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return None
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = known.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"{where}: dtype={name!r}: must be one of {', '.join(known)}")
    return dtype
