"""The layers of Gemma 3 and Gemma 4 text models, read from their configs; layers differ in shape.

A config that nests its text model (`text_config` beside a vision or audio tower) is read as that text model alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from draftproof import schema
from draftproof.kernels.experts.spec import Routing
from draftproof.models.families import Family
from draftproof.models.ffns.beside import BesideConfig
from draftproof.models.ffns.dense import DenseConfig
from draftproof.models.ffns.experts import ExpertsConfig
from draftproof.models.mixers.attention import AttentionConfig
from draftproof.models.mixers.shared_kv import SharedKVConfig
from draftproof.models.reading import KINDS, Given, check_family_keys, check_keys, check_layer_types
from draftproof.models.rope import RopeConfig, parse_rope
from draftproof.models.spec import Body, FfnConfig, LayerSpec, MixerConfig, Norms

SLIDING, FULL = KINDS

# Values of missing keys; released files leave out what the library's classes default to.
_DEFAULTS: Mapping[int, Mapping[str, Any]] = {
    3: {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "sliding_window": 4096, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "eos_token_id": 1,
        "bos_token_id": 2,
    },
    4: {
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "sliding_window": 512, "tie_word_embeddings": True, "global_head_dim": 512, "eos_token_id": 1,
        "bos_token_id": 2, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    },
}  # fmt: skip
_ROPE: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    3: {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    4: {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}
# Keys read here, or whose value is checked here; the rest is for `config.parse`.
_OWN = """rope_parameters rope_theta rope_scaling rope_local_base_freq hidden_activation query_pre_attn_scalar
sliding_window_pattern _sliding_window_pattern final_logit_softcapping attn_logit_softcapping
use_bidirectional_attention cache_implementation global_head_dim num_global_key_value_heads per_layer_config
attention_k_eq_v num_kv_shared_layers use_double_wide_mlp hidden_size_per_layer_input
vocab_size_per_layer_input enable_moe_block num_experts top_k_experts moe_intermediate_size"""
_OWN_KEYS = frozenset(_OWN.split())
# Values that are checked before anything is made of them: least counts, bounds that numbers must exceed, flags.
_COUNTS: Mapping[str, int] = {
    "num_hidden_layers": 1,
    "hidden_size": 1,
    "vocab_size": 1,
    "intermediate_size": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 1,
    "global_head_dim": 1,
    "max_position_embeddings": 1,
    "sliding_window": 1,
    "sliding_window_pattern": 1,
    "_sliding_window_pattern": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "pad_token_id": 0,
}
_NUMBERS: Mapping[str, float | None] = {
    "query_pre_attn_scalar": 0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_local_base_freq": 0,
}
_FLAGS = ("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block")
# A nested config's keys that also apply to its text model.
_OUTER_KEYS = schema.words(
    "eos_token_id bos_token_id dtype torch_dtype tie_word_embeddings quantization_config"
)
# A nested config's other keys, which describe towers that a text does not use.
TOWER_KEYS = schema.words(
    """vision_config audio_config mm_tokens_per_image vision_soft_tokens_per_image boi_token_id eoi_token_id
    image_token_id video_token_id audio_token_id boa_token_id eoa_token_id eoa_token_index boi_token_index
    eoi_token_index image_token_index"""
)
NESTED_KEYS = _OUTER_KEYS | TOWER_KEYS | schema.words("model_type text_config cache_implementation")


def read_gemma(
    raw: Mapping[str, Any], family: Family, where: str, extra: Collection[str], *, generation: int
) -> tuple[dict[str, Any], Body]:
    """(the keys that all models share, with Gemma's defaults; the layers). ValueError names what is not supported."""
    if "text_config" in raw:
        check_keys(raw, where, NESTED_KEYS | set(extra))
        outer = {key: value for key, value in raw.items() if key in _OUTER_KEYS and value is not None}
        inner = schema.section(raw, "text_config", where)
        raw = {"model_type": f"gemma{generation}_text", **inner, **outer}
    raw = {**_DEFAULTS[generation], **{k: v for k, v in raw.items() if v is not None}}
    _check(raw, where)
    _refuse(raw, generation, where)
    kinds = _kinds(raw, generation, where)
    given = _Gemma(Given(raw=raw, family=family, where=where), generation, kinds)
    layers = tuple(_layer(given, i) for i in range(len(kinds)))
    plain = {key: value for key, value in raw.items() if key not in _OWN_KEYS}
    check_family_keys(Given(raw=plain, family=family, where=where), family.keys, extra)
    cap = float(raw.get("final_logit_softcapping", 0))
    blank = min(raw.get("pad_token_id", 0), raw["vocab_size"] - 1)
    return plain, Body(layers=layers, embed_scale=raw["hidden_size"] ** 0.5, logit_cap=cap, blank_id=blank)


class _Gemma(NamedTuple):
    """A config, its generation, and the kind of each layer."""

    given: Given
    generation: int
    kinds: tuple[str, ...]


def _check(raw: Mapping[str, Any], where: str) -> None:
    """ValueError for a value of the wrong type or out of range. `config.parse` checks the keys that it reads again."""
    for key in _COUNTS:
        if key in raw:
            schema.whole(raw, key, where, low=_COUNTS[key])
    for key in _NUMBERS:
        if key in raw:
            schema.number(raw, key, where, above=_NUMBERS[key])
    for key in _FLAGS:
        schema.flag(raw, key, where)
    for key in ("rope_parameters", "rope_scaling", "per_layer_config"):
        schema.section(raw, key, where)


def _refuse(raw: Mapping[str, Any], generation: int, where: str) -> None:
    activation = raw.get("hidden_activation", raw.get("hidden_act", "gelu_pytorch_tanh"))
    num_layers = raw["num_hidden_layers"]
    num_shared = raw.get("num_kv_shared_layers", 0)
    vocab = raw["vocab_size"]
    own = raw.get("vocab_size_per_layer_input")
    both = raw.get("use_bidirectional_attention")
    for key, wrong, fix in (
        ("hidden_activation", activation != "gelu_pytorch_tanh", "only 'gelu_pytorch_tanh' is supported"),
        (
            "attn_logit_softcapping",
            raw.get("attn_logit_softcapping"),
            "soft caps inside attention are not supported",
        ),
        (
            "use_bidirectional_attention",
            both not in (None, False, "vision"),
            "tokens must not see later ones",
        ),
        ("num_kv_shared_layers", num_shared > num_layers, f"must be at most num_hidden_layers={num_layers}"),
        ("enable_moe_block", generation == 3 and raw.get("enable_moe_block"), "has no experts"),
        (
            "vocab_size_per_layer_input",
            raw.get("hidden_size_per_layer_input") and own != vocab,
            f"must equal vocab_size={vocab}",
        ),
    ):
        if wrong:
            raise ValueError(f"{where}: {key}={schema.shown(raw.get(key))}: {fix} (Gemma {generation})")


def _kinds(raw: Mapping[str, Any], generation: int, where: str) -> tuple[str, ...]:
    """Each layer's kind: as listed, else every n-th layer uses full attention; Gemma 4's last always does."""
    num_layers = raw["num_hidden_layers"]
    every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    given = raw.get("layer_types")
    if given is None:
        given = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    check_layer_types(given, num_layers, where)
    last = ["full_attention"] if generation == 4 else list(given[-1:])
    return (*given[:-1], *last)


def _layer(gemma: _Gemma, index: int) -> LayerSpec:
    given, generation, kinds = gemma
    raw, where = given.raw, given.where
    head_dim, kv_heads = _sizes(gemma, index)
    heads = raw["num_attention_heads"]
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"{where}: layer {index}: num_attention_heads={heads}, num_key_value_heads={kv_heads}, "
            f"head_dim={head_dim}: heads must be a multiple of the key-value heads, and head_dim even"
        )
    num_own = len(kinds) - raw.get("num_kv_shared_layers", 0)
    shared = index >= num_own
    eps = schema.number(raw, "rms_norm_eps", where, default=1e-6)
    offset = 1.0 if generation == 3 else 0.0
    return LayerSpec(
        mixer=_mixer(gemma, index, head_dim, kv_heads, num_own),
        ffn=_ffn(given, generation, width=raw["intermediate_size"] * _width_factor(raw, shared)),
        norms=Norms(eps=eps, offset=offset, style="sandwich"),
        input_size=raw.get("hidden_size_per_layer_input", 0),
        scaled=generation == 4,
    )


def _width_factor(raw: Mapping[str, Any], shared: bool) -> int:
    return 2 if shared and raw.get("use_double_wide_mlp") else 1


def _mixer(gemma: _Gemma, index: int, head_dim: int, kv_heads: int, num_own: int) -> MixerConfig:
    """Attention. Layers after the first `num_own` use the cache of the last of those with their kind."""
    given, generation, kinds = gemma
    raw, where, kind = given.raw, given.where, kinds[index]
    rope = _rope(_rope_of(raw, generation, kind, where), head_dim, raw["max_position_embeddings"], where)
    scale = float(raw.get("query_pre_attn_scalar", 1)) ** -0.5 if generation == 3 else 1.0
    window = raw["sliding_window"] if kind == SLIDING else 0
    heads = raw["num_attention_heads"]
    bias = given.switch(given.family.qkv_bias)
    if index >= num_own:
        return SharedKVConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            scale=scale,
            reads=_lender(kinds, index, num_own, where),
            window=window,
            bias=bias,
        )
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        scale=scale,
        window=window,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        v_norm=generation == 4,
        k_is_v=_k_is_v(raw, kind, where),
    )


def _ffn(given: Given, generation: int, width: int) -> FfnConfig:
    """An MLP, in Gemma 4 optionally with experts in parallel."""
    raw, where = given.raw, given.where
    dense = DenseConfig(width=width, gelu=True)
    if generation == 3 or not schema.flag(raw, "enable_moe_block", where):
        return dense
    num_experts = given.whole("num_experts")
    top_k = given.whole("top_k_experts")
    if top_k > num_experts:
        raise ValueError(f"{where}: top_k_experts={top_k}: must be at most num_experts={num_experts}")
    experts = ExpertsConfig(
        num_experts=num_experts,
        width=given.whole("moe_intermediate_size"),
        routing=Routing(top_k=top_k),
        gelu=True,
    )
    return BesideConfig(dense=dense, experts=experts)


def _k_is_v(raw: Mapping[str, Any], kind: str, where: str) -> bool:
    return kind == FULL and schema.flag(raw, "attention_k_eq_v", where)


def _sizes(gemma: _Gemma, index: int) -> tuple[int, int]:
    """(head size, number of KV heads) of a layer: Gemma 4's full layers have sizes of their own."""
    given, generation, kinds = gemma
    raw, where, kind = given.raw, given.where, kinds[index]
    head_dim, kv_heads = raw["head_dim"], raw["num_key_value_heads"]
    if generation != 4 or kind != FULL:
        return head_dim, kv_heads
    own = _own_sizes(raw, index, where)
    if own is None:
        own = {"head_dim": raw["global_head_dim"]} if "per_layer_config" not in raw else {}
        if _k_is_v(raw, kind, where):
            own["num_key_value_heads"] = raw.get("num_global_key_value_heads") or kv_heads
    return own.get("head_dim", head_dim), own.get("num_key_value_heads", kv_heads)


def _own_sizes(raw: Mapping[str, Any], index: int, where: str) -> dict[str, int] | None:
    """The sizes that `per_layer_config` gives a layer; None if it gives none."""
    sizes = schema.section(raw, "per_layer_config", where)
    here = f"{where}: per_layer_config"
    if sizes.get(str(index)) is None:
        return None
    own = schema.section(sizes, str(index), here)
    known = ("head_dim", "num_key_value_heads")
    schema.check_known(own, f"{here}: {index}", known)
    return {key: schema.whole(own, key, f"{here}: {index}") for key in known if own.get(key) is not None}


def _lender(kinds: tuple[str, ...], index: int, num_own: int, where: str) -> int:
    """Index of the cache that a layer after the first `num_own` reads: that of the last of those with its kind."""
    if num_own <= 0:  # an assistant: its target lends one cache of each kind
        return [kind for kind in KINDS if kind in kinds].index(kinds[index])
    lenders = [i for i in range(num_own) if kinds[i] == kinds[index]]
    if not lenders:
        raise ValueError(
            f"{where}: num_kv_shared_layers={len(kinds) - num_own}: layer {index} shares keys and values of a "
            f"{kinds[index]!r} layer, but none of the first {num_own} layers is one"
        )
    return lenders[-1]


def _rope_of(raw: Mapping[str, Any], generation: int, kind: str, where: str) -> dict[str, Any]:
    """The rotary settings of one kind of layer, as a flat dict."""
    given = schema.section(raw, "rope_parameters", where)
    for key in given:
        schema.section(given, key, f"{where}: rope_parameters")
    found = {**_ROPE[generation][kind], **(given.get(kind) or {})}
    if generation == 3 and not given:
        # the older layout: one base per kind, and scaling for full layers only
        key = "rope_theta" if kind == "full_attention" else "rope_local_base_freq"
        found["rope_theta"] = raw.get(key, found["rope_theta"])
        if kind == "full_attention":
            scaling = schema.section(raw, "rope_scaling", where)
            found |= {k: v for k, v in scaling.items() if k != "type"}
            found["rope_type"] = scaling.get("type", found["rope_type"])
    return found


def _rope(given: Mapping[str, Any], head_dim: int, max_positions: int, where: str) -> RopeConfig:
    """The rotary embedding of one kind of layer. Type "proportional": only a leading part of the pairs rotates, at the
    frequencies that it would have if all did."""
    if given.get("rope_type") != "proportional":
        return parse_rope({"rope_parameters": given}, head_dim, max_positions, where)
    here = f"{where}: rotary embedding"
    schema.check_known(given, here, ("rope_type", "rope_theta", "partial_rotary_factor", "factor"))
    share = schema.number(given, "partial_rotary_factor", here, default=1.0)
    if share > 1:
        raise ValueError(f"{here}: partial_rotary_factor={share:g}: must be a number from 0 to 1")
    return RopeConfig(
        theta=schema.number(given, "rope_theta", here, low=1),
        rotary_dim=head_dim,
        type="proportional",
        factor=schema.number(given, "factor", here, above=0, default=1.0),
        num_turning=int(share * head_dim // 2),
    )
