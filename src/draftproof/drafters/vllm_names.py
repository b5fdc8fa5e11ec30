"""Keys and method names of vLLM's speculative_config (0.33) and their meaning here: a table and its functions."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftproof.config import SpeculativeConfig
from draftproof.schema import no_such_choice

ANY = object()  # the row holds for every value that has no row of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table: a key, or one of its values.

    `effect`: "read" as it is, "mapped" to `becomes`, "accepted" (has no effect here, logged in one INFO line) or
    "refused". `why`: the reason, and what to use instead. `default`: vLLM's own, treated like a missing key. `kinds`:
    the types that vLLM takes. `becomes`: our methods; if several, the checkpoint's content decides.
    """

    key: str
    value: object = ANY
    effect: Literal["read", "mapped", "accepted", "refused"]
    why: str = ""
    default: object = None
    kinds: tuple[type, ...] = (object,)
    becomes: tuple[str, ...] = ()


def _method(value: str, *becomes: str, why: str = "") -> Row:
    return Row(
        key="method",
        value=value,
        effect="read" if becomes == (value,) else "mapped",
        becomes=becomes,
        why=why,
    )


def _accepted(key: str, kinds: type | tuple[type, ...], why: str, default: object = None) -> Row:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return Row(key=key, effect="accepted", kinds=kinds, why=why, default=default)


_MTP_FAMILIES = (
    "deepseek",
    "dots3_note",
    "mimo",
    "mimo_v2",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_ocr",
    "ernie",
    "nemotron_h",
    "exaone_moe",
    "exaone4_5",
    "qwen3_next",
    "qwen4_exp",
    "qwen3_5",
    "longcat_flash",
    "bailing_hybrid_v3",
    "minimax_m3",
    "bailing_hybrid",
    "kimi_k3",
    "pangu_ultra_moe",
    "step3p5",
    "step5",
    "hy_v3",
    "hy_v4",
    "inkling",
    "glm5_next",
)
_MEASURING = "it makes up acceptance to measure speed, and so changes the output; use method='replay'"
_FLY = "has a meaning with rejection_sample_method='fly' alone, which is not here"
_INTERNAL = "vLLM fills it in by itself; leave it out"

TABLE: tuple[Row, ...] = (
    _method("ngram", "ngram"),
    _method("ngram_gpu", "ngram", why="the search runs where the model does"),
    _method("draft_model", "draft_model", "pard", why="by the checkpoint's content"),
    _method("suffix", "suffix"),
    Row(
        key="method",
        value="custom_class",
        effect="mapped",
        why="to method='module.Class', the class that model='module.Class' names",
    ),
    _method("eagle", "eagle"),
    _method("eagle3", "eagle3", "peagle", why="by the checkpoint's content"),
    _method("mtp", "mtp", "gemma4_mtp", why="by the checkpoint's content"),
    *(_method(f"{family}_mtp", "mtp", why="the target says of which family") for family in _MTP_FAMILIES),
    _method("gemma4_mtp", "gemma4_mtp"),
    _method("dflash", "dflash", "dflash2", "xpress", why="by the checkpoint's content"),
    _method("dspark", "dspark"),
    Row(
        key="method",
        value="extract_hidden_states",
        effect="refused",
        why="it exports states and drafts nothing; a class of your own with spec = DraftSpec(taps=...) is given them",
    ),
    Row(key="model", value="ngram", effect="mapped", becomes=("ngram",)),
    Row(key="model", value="[ngram]", effect="mapped", becomes=("ngram",)),
    Row(
        key="model",
        effect="read",
        why="a folder or hub id; a dotted name that is no folder names a class, as method='module.Class' does",
    ),
    Row(key="num_speculative_tokens", effect="read", why="at most 64; 'auto', or left out: as many as pay"),
    Row(key="parallel_drafting", effect="read", default=False, why="the checkpoint must be of such a kind"),
    Row(key="quantization", effect="read", why="None or 'fp8'"),
    Row(key="max_model_len", effect="read", why="no drafts beyond it; the engine's own stays as it is"),
    Row(key="revision", effect="read"),
    Row(key="prompt_lookup_max", effect="read", why="5 where left out, or prompt_lookup_min if that is more"),
    Row(key="prompt_lookup_min", effect="read", why="2 where left out, or prompt_lookup_max if that is less"),
    Row(key="suffix_decoding_max_tree_depth", effect="read", default=24),
    Row(key="suffix_decoding_max_cached_requests", effect="read", default=10_000),
    Row(key="suffix_decoding_max_spec_factor", effect="read", default=1.0),
    Row(key="suffix_decoding_min_token_prob", effect="read", default=0.1),
    _accepted("enforce_eager", bool, "drafts run as LLM(enforce_eager=...) says"),
    _accepted("moe_backend", str, "the fastest there is runs the drafter's experts"),
    _accepted("attention_backend", str, "drafts run on the one of LLM(attention_backend=...)"),
    _accepted("kv_cache_dtype", str, "the drafter's cache has the engine's dtype", default="auto"),
    _accepted("code_revision", str, "no code of a checkpoint is ever run"),
    _accepted("index_share_for_mtp_iteration", bool, "no target here has sparse indices to share"),
    _accepted("disable_padded_drafter_batch", bool, "rows are laid out as passes need them", default=False),
    _accepted(
        "disable_eagle_block_drop", bool, "no cached block is dropped for a drafter's sake", default=False
    ),
    _accepted(
        "disable_lookahead_block_hashes", bool, "a shared page must be right for the drafter", default=False
    ),
    _accepted("draft_lm_head_quantization", str, "quantization='fp8' rounds a drafter's products"),
    _accepted("use_local_argmax_reduction", bool, "there is one device", default=False),
    _accepted(
        "use_heterogeneous_vocab",
        bool,
        "vocabularies are mapped where they differ; see token_map",
        default=False,
    ),
    _accepted("num_speculative_tokens_per_batch_size", (list, tuple), "'auto' chooses by measured costs"),
    _accepted("enable_adaptive_verification", bool, "'auto' chooses by measured costs", default=False),
    _accepted("dspark_draft_topk", int, "all candidates are weighed"),
    _accepted("xpress_topc", int, "all tokens are weighed"),
    Row(
        key="draft_tensor_parallel_size",
        effect="refused",
        default=1,
        why="there is one device; leave it out, or give 1",
    ),
    Row(key="tensor_parallel_size", effect="refused", why="there is one device; leave it out"),
    Row(
        key="rejection_sample_method",
        value="standard",
        effect="accepted",
        default="standard",
        why="drafts are verified as LLM(verification=...) says, 'exact' where nothing is said",
    ),
    Row(
        key="rejection_sample_method",
        value="block",
        effect="accepted",
        why="drafts are verified as LLM(verification=...) says, where there is 'block' too",
    ),
    Row(key="rejection_sample_method", value="synthetic", effect="refused", why=_MEASURING),
    Row(
        key="rejection_sample_method",
        value="fly",
        effect="refused",
        why="it accepts tokens that the target would not have given; leave it out",
    ),
    Row(key="synthetic_acceptance_rates", effect="refused", why=f"{_MEASURING} and its acceptance=[...]"),
    Row(key="synthetic_acceptance_length", effect="refused", why=f"{_MEASURING} and its acceptance=[...]"),
    Row(
        key="draft_sample_method",
        value="greedy",
        effect="accepted",
        default="greedy",
        why="drafts are drawn with the target's own noise, at the request's temperature",
    ),
    Row(
        key="draft_sample_method",
        value="probabilistic",
        effect="accepted",
        why="drafts are drawn with the target's own noise, at the request's temperature",
    ),
    _accepted("fly_window_size", int, _FLY),
    _accepted("fly_entropy_threshold", (int, float), _FLY, default=0.3),
    _accepted("fly_entropy_top_k", int, _FLY, default=3),
    Row(key="draft_load_config", effect="refused", why="give load_format='auto' or 'dummy'"),
    *(
        Row(key=key, effect="refused", why=_INTERNAL)
        for key in (
            "target_model_config",
            "target_parallel_config",
            "draft_model_config",
            "draft_parallel_config",
        )
    ),
)

_CUSTOM = "custom_class"


def named(settings: SpeculativeConfig) -> SpeculativeConfig:
    """The settings with our name for the method. A name that stands for several methods stays: see `accepts`.

    ValueError for a method that is refused.
    """
    method = settings.method
    model = settings.model
    if method is None:
        method = _method_in(model)
    if method == _CUSTOM:
        if not _is_dotted(model):
            raise ValueError(
                f"speculative_config: method={_CUSTOM!r}, model={model!r}: give model='module.Class', the class to run"
            )
        return dataclasses.replace(settings, method=model, model=None)
    row = _row("method", method)
    if row is not None and row.effect == "refused":
        raise _refusal(row, method)
    if row is not None and len(row.becomes) == 1:
        method = row.becomes[0]
    is_a_name = model is not None and model in (settings.method, method, f"[{method}]")
    if is_a_name and not Path(str(model)).is_dir():
        model = None  # for methods without a checkpoint, vLLM puts the method's name here
    return dataclasses.replace(settings, method=method, model=model)


def accepts(method: str | None, found: str) -> bool:
    """Whether a checkpoint for the method `found` satisfies the user's `method`; None: any does."""
    row = _row("method", method)
    return method in (None, found) or (row is not None and found in row.becomes)


def read_options(given: Mapping[str, Any], own: Collection[str] | None) -> dict[str, Any]:
    """A drafter's options without vLLM's keys; `own`: those its method reads, None: any.

    ValueError for a key or value that is refused. One INFO line names the keys that have no effect here.
    """
    left: dict[str, Any] = {}
    unused: list[str] = []
    for key, value in given.items():
        if key not in _KEYS:
            left[key] = value
            continue
        row = _row(key, value)
        if value is None:
            continue
        if row is None:
            known = [row.value for row in TABLE if row.key == key and row.effect != "refused"]
            raise no_such_choice(f"speculative_config: {key}", value, known)
        if row.effect == "read" and (own is None or key in own):
            left[key] = value
        elif _same(value, row.default):
            continue
        elif row.effect == "refused":
            raise _refusal(row, value)
        else:
            unused.append(f"{key}={value!r} ({_reason(row, value)})")
    if unused:
        logging.getLogger(__name__).info("speculative_config: nothing to change for %s", ", ".join(unused))
    return left


def defaults() -> dict[str, Any]:
    """vLLM's keys with their default values."""
    found: dict[str, Any] = {}
    for row in TABLE:  # the first row of a key has its default
        found.setdefault(row.key, row.default)
    return found


_KEYS = frozenset(row.key for row in TABLE)


def _row(key: str, value: object) -> Row | None:
    """The key's row for this value, else its row for any value."""
    rows = [row for row in TABLE if row.key == key]
    exact = [row for row in rows if _same(row.value, value)]
    return next(iter(exact or [row for row in rows if row.value is ANY]), None)


def _method_in(model: object) -> str | None:
    """The method that `model` alone stands for; None if it is a checkpoint."""
    if not isinstance(model, str) or Path(model).is_dir():
        return None
    row = _row("model", model)
    assert row is not None
    return _CUSTOM if _is_dotted(model) else next(iter(row.becomes), None)


def _is_dotted(model: object) -> bool:
    parts = model.split(".") if isinstance(model, str) else []
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _reason(row: Row, value: object) -> str:
    """The reason why a value has no effect. ValueError if vLLM rejects the value, too."""
    if row.effect == "read":
        return "a setting of other methods"
    fits = isinstance(value, row.kinds) and (bool in row.kinds or not isinstance(value, bool))
    if not fits and row.value is ANY:
        names = " or ".join(kind.__name__ for kind in row.kinds)
        raise ValueError(f"speculative_config: {row.key}={value!r}: must be {names}, or left out: {row.why}")
    return row.why


def _refusal(row: Row, value: object) -> ValueError:
    return ValueError(f"speculative_config: {row.key}={value!r}: not supported: {row.why}")


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other
