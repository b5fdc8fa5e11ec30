"""Immutable settings, validated on construction. Field names are vLLM's where vLLM has the field."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from draftproof.schema import (
    check_choice,
    check_flag,
    check_number,
    check_whole,
    documented,
    is_whole,
    reject_unknown_keys,
    shown,
)

Verification = Literal["exact", "rejection", "block"]
Routing = Literal["prefix", "load", "round_robin"]
T = TypeVar("T")
ENGINE_WIDE = (
    "policy",
    "max_faults",
    "time_limit",
)  # settings of the speculation as a whole, not of one drafter
# vLLM settings that are not settings here: the accepted values, which ask for what happens anyway, and the reason.
VLLM_SETTINGS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tensor_parallel_size": ((1,), "there is one device"),
    "pipeline_parallel_size": ((1,), "there is one device"),
    "trust_remote_code": ((False,), "no code of a checkpoint is ever run"),
    "enable_chunked_prefill": ((True,), "prompts longer than max_num_batched_tokens are computed in chunks"),
    "disable_log_stats": ((True, False), "statistics are in LLM.stats, and go to the log at level INFO"),
    "swap_space": ((0,), "what a preempted request loses is computed again"),
    "cpu_offload_gb": ((0,), "all weights are on the device"),
    "quantization": ((), "targets are computed in their dtype"),
    "kv_cache_dtype": (("auto",), "the cache has the target's dtype"),
    "tokenizer_mode": (("auto",), "there is one kind of tokenizer"),
    "enable_lora": ((False,), "there are no adapters"),
    "enable_prompt_embeds": ((True, False), "prompts may be embeddings"),
}
_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
MOST_BLOCK_SIZE = 1024  # attention is certified on full blocks
MOST_REPLICAS = 64
MOST_SEQUENCES = 4096  # every table has a row for each, used or not


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of drafting. `method` None: derived from the checkpoint that `model` points at.

    `num_speculative_tokens`: an integer always asks for that many drafts. "auto" (also None, the default) asks for the
    number that measured costs and acceptance make fastest, which is 0 where drafting does not pay. Its upper limit is
    the checkpoint's own number, else the method's (5 for most; n-gram and suffix 16); each member of a chain has its
    own limit, and the chain's is the largest of them. `policy`, kept for one version: "fixed" and "adaptive" apply to
    the given number of drafts, or to the checkpoint's own.

    `quantization` "fp8" rounds the weights of the draft checkpoint's products to 8 bits: half the bytes that a draft
    pass reads on a GPU of compute capability 8.9 or later, and slightly different drafts. `image_inputs`: the input of
    a head that reads the target's states, at rows that carry embeddings (of images, of `prompt_embeds`): the embeddings
    (None, "embeddings") or the ids that stand for them ("tokens"); no checkpoint records which it was trained with. A
    draft model that reads images computes its own embeddings. `hf_overrides`: keys that replace those of the draft
    checkpoint's config.json, as in `EngineConfig`. `revision` and `load_format` apply to the draft checkpoint (None:
    the hub's default, the engine's).

    `max_model_len`: a request gets no drafts for its tokens from this number on. `parallel_drafting` True: the
    checkpoint must be of a kind that drafts all tokens in one pass. `trusted` True: a user's drafter class sees live
    buffers, must not write to them, and is recorded like the built-in drafters; it must therefore depend on device data
    only, unless it declares host_tokens. `options`: the method's own settings (every key that is not a field, checked
    by the method). Lists and dicts are copied.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    revision: str | None = None
    load_format: Literal["auto", "gguf", "dummy"] | None = None
    max_model_len: int | None = None
    parallel_drafting: bool | None = None
    trusted: bool = False
    policy: Literal["adaptive", "fixed"] | None = None
    max_faults: int = 8
    time_limit: float | None = None
    quantization: Literal["fp8"] | None = None
    image_inputs: Literal["embeddings", "tokens"] | None = None
    hf_overrides: Mapping[str, Any] | None = None
    drafters: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("drafters", "options", "hf_overrides"):
            object.__setattr__(self, name, _copied(getattr(self, name)))
        k: Any = self.num_speculative_tokens
        if k == "auto" and self.policy == "fixed":
            raise ValueError(
                "speculative_config: policy='fixed' beside num_speculative_tokens='auto': leave one of them out"
            )
        if k == "auto":
            object.__setattr__(self, "num_speculative_tokens", None)
        elif k is not None and not is_whole(k, 1, 64):
            raise ValueError(
                f"speculative_config: num_speculative_tokens={k!r}: must be an integer from 1 to 64, or 'auto'; "
                "leave speculative_config out to decode plainly"
            )
        _check_mapping("speculative_config: hf_overrides", self.hf_overrides)
        check_choice("speculative_config: policy", self.policy, (None, "adaptive", "fixed"))
        check_choice("speculative_config: quantization", self.quantization, (None, "fp8"))
        check_choice("speculative_config: image_inputs", self.image_inputs, (None, "embeddings", "tokens"))
        check_choice("speculative_config: load_format", self.load_format, (None, "auto", "gguf", "dummy"))
        if self.parallel_drafting is not None:
            check_flag("speculative_config: parallel_drafting", self.parallel_drafting)
        check_flag("speculative_config: trusted", self.trusted)
        check_whole("speculative_config: max_faults", self.max_faults, 1)
        if self.max_model_len is not None:
            check_whole("speculative_config: max_model_len", self.max_model_len, 1)
        texts = (
            ("method", str, "a name"),
            ("revision", str, "a name"),
            ("model", (str, os.PathLike), "a path"),
        )
        if self.time_limit is not None:
            check_number("speculative_config: time_limit", self.time_limit, above=0)
        for name, kinds, wanted in texts:
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise ValueError(f"speculative_config: {name}={value!r}: must be a string, {wanted}")

    @property
    def is_auto(self) -> bool:
        """Whether the number of drafts adapts to costs and acceptance."""
        return self.policy == "adaptive" or (self.policy is None and self.num_speculative_tokens is None)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> SpeculativeConfig:
        """The settings in `raw`; keys that are not fields become `options`."""
        if not isinstance(raw, Mapping):
            raise ValueError(f"speculative_config={raw!r}: must be a dict such as {{'method': 'ngram'}}")
        names = {f.name for f in dataclasses.fields(cls)} - {"options"}
        misspelt = {k: v for k, v in raw.items() if k not in names and str(k).lower() in names}
        reject_unknown_keys("speculative_config", misspelt, sorted(names))
        known = {k: v for k, v in raw.items() if k in names}
        if "drafters" in known:
            if not isinstance(known["drafters"], (list, tuple)):
                raise ValueError(
                    f"speculative_config: drafters={known['drafters']!r}: must be a list of dicts"
                )
            known["drafters"] = tuple(known["drafters"])
        return cls(**known, options={k: v for k, v in raw.items() if k not in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where events of the prefix cache are published. Names and defaults are vLLM's.

    Events go out at `endpoint`. Subscribers that missed some can request the last `buffer_steps` batches at
    `replay_endpoint`. At most `max_queue_size` batches wait to be sent. Each replica has its own ports: its number is
    added to the port. `publisher` None: zmq, if events are enabled.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        where = "kv_events_config: "
        check_flag(where + "enable_kv_cache_events", self.enable_kv_cache_events)
        check_choice(where + "publisher", self.publisher, (None, "null", "zmq"))
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            check_whole(where + name, getattr(self, name), 1)
        for name in ("endpoint", "replay_endpoint", "topic"):
            value: Any = getattr(self, name)
            if not isinstance(value, str) and not (name == "replay_endpoint" and value is None):
                raise ValueError(f"{where}{name}={shown(value)}: must be text")

    @property
    def is_published(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> KVEventsConfig:
        if not isinstance(raw, Mapping):
            raise ValueError(
                f"kv_events_config={shown(raw)}: must be a dict such as {{'enable_kv_cache_events': True}}"
            )
        reject_unknown_keys("kv_events_config", raw, [f.name for f in dataclasses.fields(cls)])
        return cls(**raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. Counts are numbers of tokens, requests or blocks.

    `hf_overrides`: keys that replace those of the target's config.json (None removes a key; dicts are merged).
    `num_kv_blocks` None: sized from free memory; on a GPU so that `gpu_memory_utilization` of its total memory is in
    use. `load_format="dummy"`: random weights; only config.json is read from the models' folders. `exact=False` lets
    products and attention use whatever is fastest, for comparison: rows may then depend on their batch. `native=False`
    uses torch operators only (slower). `bf16_arithmetic="widened"` does not use the processor's bf16 instructions, so
    that all x86-64 processors with AVX2 give equal bits in bf16, as they do in fp32. `enforce_eager=True` runs every
    pass without recording it. Lists and dicts are copied.
    """

    model: str | None = documented(
        None,
        "Target model: a directory, a .gguf file or a hub id. Left out: $DRAFTPROOF_MODEL, else SmolLM2 where "
        "draftproof[demo] is installed, else tiny, which comes with draftproof.",
    )
    tokenizer: str | None = documented(None, "Tokenizer directory or hub id, if it is not the model's.")
    revision: str | None = documented(None, "Branch, tag or commit of a hub id.")
    allowed_local_media_path: str | None = documented(
        None, "Folder whose image files messages may name. Left out: none."
    )
    allowed_media_domains: Sequence[str] | None = documented(
        None,
        "Domains that images of messages may be fetched from; * for all. Left out: nothing is fetched.",
    )
    hf_overrides: Mapping[str, Any] | None = documented(
        None, "Keys that replace those of the target's config.json, as JSON; null takes one out."
    )
    speculative_config: SpeculativeConfig | None = documented(
        None, "The drafter: JSON as for LLM(speculative_config=...), or just a method or a directory."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = documented(
        "auto", "Arithmetic of the target: auto, float32, bfloat16 or float16."
    )
    load_format: Literal["auto", "gguf", "dummy"] = documented(
        "auto",
        "auto (safetensors, or a .gguf file), gguf, or dummy: random weights; of a model's folder only config.json "
        "is read.",
    )
    device: str = documented(
        "auto",
        "cpu, cuda, cuda:1; auto takes a GPU if there is one. With replicas also one for each: cuda:0,cuda:2.",
    )
    data_parallel_size: int = documented(
        1, "Number of replicas: engines in separate processes, each with a share of the cores or its own GPU."
    )
    data_parallel_routing: Routing = documented(
        "prefix",
        "How requests are routed to replicas: prefix (to the one with the least left to compute), load or round_robin.",
    )
    kv_events_config: KVEventsConfig | None = documented(
        None,
        "Publish events of the prefix cache for routers; JSON with vLLM's keys: '{\"enable_kv_cache_events\": true}'.",
    )
    max_model_len: int | None = documented(None, "Maximum length of prompt and output together, in tokens.")
    max_num_seqs: int = documented(64, "Maximum number of requests decoded at once.")
    max_num_batched_tokens: int = documented(
        2048, "Maximum number of tokens in one pass; longer prompts are computed in chunks."
    )
    num_kv_blocks: int | None = documented(
        None, "Size of the key-value cache in blocks. Left out: chosen from free memory."
    )
    gpu_memory_utilization: float = documented(
        0.9, "Share of the GPU's memory that may be used, weights and cache together."
    )
    block_size: int = documented(16, "Tokens in a block of the key-value cache.")
    enable_prefix_caching: bool = documented(True, "Reuse cached keys and values of common prompt prefixes.")
    seed: int = documented(0, "Engine seed, from which requests without a seed of their own get one.")
    bf16_arithmetic: Literal["auto", "widened"] = documented(
        "auto", "auto, or widened: compiled operators give the same bf16 bits on every processor."
    )
    exact: bool = documented(True, "Make every row independent of its batch, bit for bit.")
    verification: Verification = documented(
        "exact", "exact (bit-equal output), or rejection or block (equal in distribution only)."
    )
    native: bool = documented(True, "Use compiled operators where a compiler is found.")
    enforce_eager: bool = documented(False, "Record nothing: no recorded programs, no CUDA graphs.")
    attention_backend: str | None = documented(
        None, "Attention implementation. Left out: the fastest exact one on this machine."
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "hf_overrides", _copied(self.hf_overrides))
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice("load_format", self.load_format, ("auto", "gguf", "dummy"))
        check_choice("bf16_arithmetic", self.bf16_arithmetic, ("auto", "widened"))
        check_choice("verification", self.verification, ("exact", "rejection", "block"))
        check_choice("data_parallel_routing", self.data_parallel_routing, ("prefix", "load", "round_robin"))
        check_whole("data_parallel_size", self.data_parallel_size, 1, MOST_REPLICAS)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            check_whole(name, getattr(self, name), 1)
        check_whole("block_size", self.block_size, 1, MOST_BLOCK_SIZE)
        if self.max_num_seqs > MOST_SEQUENCES:
            raise ValueError(f"max_num_seqs={self.max_num_seqs}: must be at most {MOST_SEQUENCES}")
        for name in ("max_model_len", "num_kv_blocks"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, high=1, above=0)
        _check_mapping("hf_overrides", self.hf_overrides)
        for name in ("exact", "native", "enforce_eager", "enable_prefix_caching"):
            check_flag(name, getattr(self, name))
        for name in (
            "model",
            "tokenizer",
            "revision",
            "device",
            "attention_backend",
            "allowed_local_media_path",
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, os.PathLike)):
                raise ValueError(f"{name}={value!r}: must be text")
        _check_domains(self.allowed_media_domains)
        if not is_whole(self.seed):
            raise ValueError(f"seed={self.seed!r}: must be an integer")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """The settings in `LLM`'s keywords; ValueError for an unknown one suggests the nearest known name."""
        kwargs = _without_vllms(kwargs)
        reject_unknown_keys("LLM", kwargs, [f.name for f in dataclasses.fields(cls)])
        raw = kwargs.get("speculative_config")
        if raw is not None and not isinstance(raw, SpeculativeConfig):
            kwargs["speculative_config"] = SpeculativeConfig.from_dict(raw)
        events = kwargs.get("kv_events_config")
        if events is not None and not isinstance(events, KVEventsConfig):
            kwargs["kv_events_config"] = KVEventsConfig.from_dict(events)
        return cls(**kwargs)


def _without_vllms(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without vLLM's extra ones. ValueError if one of those has a value that is not supported."""
    left = dict(given)
    for name, (values, why) in VLLM_SETTINGS.items():
        value = left.pop(name, None)
        if value is not None and value not in values:
            raise ValueError(f"LLM: {name}={shown(value)}: not supported: {why}; leave it out")
    if left.get("seed", 0) is None:
        del left["seed"]
    dtype = str(left.get("dtype", "auto")).removeprefix("torch.")
    return {**left, "dtype": _DTYPES.get(dtype, dtype)} if "dtype" in left else left


def _copied(value: Any) -> Any:
    """`value` with its dicts, lists and tuples copied recursively; anything else is returned unchanged."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(inner) for inner in value)
    return value


def parse_options(where: str, raw: Mapping[str, Any], into: type[T]) -> T:
    """Build the dataclass `into` from a drafter's `options`, refusing unknown keys."""
    known = [f.name for f in dataclasses.fields(into)]  # type: ignore[arg-type]
    reject_unknown_keys(where, raw, known)
    return into(**raw)


def _check_domains(domains: object) -> None:
    named = domains if isinstance(domains, (list, tuple)) else [None]
    if domains is None or all(isinstance(each, str) and each and "/" not in each for each in named):
        return
    raise ValueError(
        f"allowed_media_domains={shown(domains)}: must be a list of domains, such as ['upload.wikimedia.org'], or ['*']"
    )


def _check_mapping(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise ValueError(
            f"{name}={shown(value)}: must be a dict of keys of config.json, such as {{'rope_theta': 1e6}}"
        )
