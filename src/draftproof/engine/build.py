"""From an EngineConfig to an engine: finds the files, loads models, sizes the cache, wires the parts together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from draftproof.attention import registry as registry_of_attention
from draftproof.attention.base import AttentionBackend
from draftproof.attention.exactness import AttentionShape
from draftproof.attention.given import NOTHING_ADDED
from draftproof.attention.turns import Turns
from draftproof.cache.pages import PageAllocator
from draftproof.cache.pool import LayerKV, PagedCache, PagedKV, allocate
from draftproof.cache.states import LayerState, StateSpec
from draftproof.cache.windows import WindowPages
from draftproof.config import ENGINE_WIDE, EngineConfig, SpeculativeConfig
from draftproof.drafters import registry
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, KnownTokens, OwnEmbeddings
from draftproof.drafters.chain import ChainDrafter
from draftproof.drafters.contained import DrafterError
from draftproof.drafters.context import DraftContext
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.drafters.short_texts import ShortTexts
from draftproof.engine import memory, operators, profile, reporting
from draftproof.engine.acceptance import Acceptance
from draftproof.engine.core import EngineCore
from draftproof.engine.costs import levels_of
from draftproof.engine.encoders import CertifiedEncoder, name_of
from draftproof.engine.engine import Engine
from draftproof.engine.items import ItemStore, SlotItems
from draftproof.engine.locate import locate
from draftproof.engine.logprobs import LogprobScorer
from draftproof.engine.plans import DraftPlan, Files, draft_plans
from draftproof.engine.policy import AutoPolicy, FixedPolicy, Policy
from draftproof.engine.runner import ModelRunner
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.state import State
from draftproof.kernels.ops import Ops
from draftproof.matmul import products
from draftproof.matmul.certify import BUCKETS
from draftproof.matmul.linear import LinearPlanner
from draftproof.matmul.spec import DENSE
from draftproof.metrics import EngineStats
from draftproof.models.builder import LayerBuilder
from draftproof.models.config import ModelConfig, read_config, read_vision
from draftproof.models.decoder import Decoder
from draftproof.models.image_encoder import ImageEncoder
from draftproof.models.vision import Vision, is_stored
from draftproof.models.weights import RandomWeights, Weights, WeightSource
from draftproof.runtime import environment, graphs, native
from draftproof.runtime.graphs import Graphs
from draftproof.runtime.room import free_bytes, give_back_freed_memory, keep_freed_memory
from draftproof.runtime.threads import own_precision
from draftproof.sampling.lossy import LossyVerifier
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.sampler import Sampler
from draftproof.sampling.verifier import ExactVerifier, Verifier

log = logging.getLogger(__name__)
BATCHES = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
)  # numbers of requests that speed-ups are predicted for
MOST_ITEM_BYTES = 256 << 20  # embeddings of items that are kept for the next request with the same
# rows of passes with prompts that are filled up: fewer are rare, and more keep a device busy for longer than their
# launches take
LEAST_MIXED_ROWS, MOST_MIXED_ROWS = 16, 512
ProgressCallback = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine and what its front needs to know of it."""

    engine: Engine
    items: ItemStore
    vision: Vision | None
    directory: Path
    model: ModelConfig
    max_model_len: int
    num_drafts: int  # K, 0 without a drafter
    methods: tuple[str, ...]  # of the drafter, or of a chain's members
    memory: memory.Memory
    arithmetic: str
    operators: str
    device_name: str  # "cpu", or a GPU's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What target and drafters are both built on."""

    config: EngineConfig
    directory: Path
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    arithmetic: str
    library: native.Library | None
    ops: Ops
    backend: AttentionBackend
    planner: LinearPlanner
    graphs: Graphs
    new_graphs: Callable[[], Graphs]
    items: ItemStore
    vision: Vision | None
    max_model_len: int

    @property
    def most_rows(self) -> int:
        """Rows of the longest pass there can be."""
        return _most_rows(self.config, self.vision)


def _most_rows(config: EngineConfig, vision: Vision | None) -> int:
    return config.max_num_batched_tokens + (0 if vision is None else vision.most_whole_rows)


@torch.inference_mode(False)  # what is made here is written to later, in whatever mode
@own_precision()
def build(config: EngineConfig, progress: ProgressCallback | None = None) -> Loaded:
    """Raises ValueError for whatever the user got wrong, before anything expensive is done where possible."""
    config, directory = locate(config, progress)
    base = _base(config, directory, progress)
    speculative = config.speculative_config
    random = RandomWeights(1, base.device, base.dtype)
    files = Files(directory, random, config.load_format, config.hf_overrides)
    plans = draft_plans(speculative, files) if speculative else []
    num_drafts = max((plan.num_drafts for plan in plans), default=0)
    dummy = config.load_format == "dummy"
    target_weights = RandomWeights(0, base.device, base.dtype) if dummy else Weights.open(directory)
    num_encoder_bytes = _load_encoder(base, target_weights)
    target = Decoder.load(
        target_weights, base.model, base.ops, base.planner, base.device, base.dtype,
        max_positions=base.max_model_len + num_drafts + 1,
    )  # fmt: skip
    num_target_bytes = base.planner.weight_bytes
    num_target_packed = base.planner.num_packed
    members = [
        _boxed(base, _one_drafter(base, target, target_weights, plan, num_drafts), plan) for plan in plans
    ]
    _check_fit(base, target, members)
    base.planner.certify()
    drafting = _drafting(base, plans, members)
    groups = _groups(base, target, drafting)
    engine, num_graph_bytes = _engine(base, target, drafting, groups, progress)
    target_packed = base.planner.packed(0, num_target_packed)
    draft_packed = base.planner.packed(num_target_packed, base.planner.num_packed)
    used = memory.Memory(
        weights=num_target_bytes + sum(linear.held_bytes for linear in target_packed),
        unread=sum(linear.stored_bytes - linear.weight_bytes for linear in target_packed),
        encoder=num_encoder_bytes + sum(own.num_bytes for own in drafting.spec.embeds),
        items=MOST_ITEM_BYTES * (1 + len(drafting.spec.embeds)) if base.vision else 0,
        draft_weights=base.planner.weight_bytes - num_target_bytes
        + sum(linear.held_bytes for linear in draft_packed),
        kv_bytes_per_token=memory.bytes_per_token(_full(target.kv, groups), base.dtype),
        draft_kv_bytes_per_token=memory.bytes_per_token(drafting.spec.kv, base.dtype),
        num_blocks=engine.scheduler.pages.num_blocks, block_size=config.block_size, graphs=num_graph_bytes,
        window_kv=sum(
            pages.num_blocks * config.block_size * group.bytes_per_token
            for pages, group in zip(engine.scheduler.windows, groups, strict=True)
        ),
    )  # fmt: skip
    if base.device.type == "cpu":  # after loading, whose memory may go
        give_back_freed_memory()
        keep_freed_memory()
    return Loaded(
        engine=engine,
        items=base.items,
        vision=base.vision,
        directory=directory,
        model=base.model,
        max_model_len=base.max_model_len,
        num_drafts=drafting.num_drafts,
        methods=drafting.methods,
        memory=used,
        arithmetic=base.arithmetic,
        operators=operators.describe(base.library),
        device_name=torch.cuda.get_device_name(base.device) if base.device.type == "cuda" else "cpu",
    )


def vision_of(config: EngineConfig, directory: Path) -> Vision | None:
    """What reads images; None for a model without such a part, or of whose part the files hold nothing."""
    vision = read_vision(directory, config.hf_overrides)
    if vision is None or config.load_format == "dummy":
        return vision
    if is_stored(Weights.open(directory)):
        return vision
    log.info("%s: holds no tensors of an image encoder: the model reads text alone", directory)
    return None


def _load_encoder(base: _Base, weights: WeightSource) -> int:
    """Bytes of the weights of what reads images; 0 where the model reads none."""
    if base.vision is None:
        return 0
    encoder = ImageEncoder(base.vision, weights, base.device, base.dtype)
    # threads are a CPU's
    is_certified = base.config.exact and base.device.type == "cpu"
    base.items.encoders["image"] = (
        CertifiedEncoder(encoder, name_of(base.vision, base.dtype)) if is_certified else encoder
    )
    return encoder.num_bytes


def _check_fit(base: _Base, target: Decoder, members: Seq[DrafterSandbox]) -> None:
    """ValueError for drafters whose taps the target has not, or whose heads no attention backend here takes."""
    for member in members:
        spec = member.spec
        target.check_taps(spec.taps.layers)
        if spec.states and not member.is_trusted:
            raise ValueError(
                f"drafter {member.name}: spec.states={spec.states}: their code would run in the engine's steps; set "
                "speculative_config['trusted']=True, or keep them in the drafter"
            )
        shapes = spec.attention or [
            AttentionShape(num_heads=kv.heads, num_kv_heads=kv.heads, head_dim=kv.head_dim) for kv in spec.kv
        ]
        whose = f"drafter {member.name}"
        registry_of_attention.check_sizes(base.device, base.config.attention_backend, shapes, whose)


def _base(config: EngineConfig, directory: Path, progress: ProgressCallback | None) -> _Base:
    model = read_config(directory, overrides=config.hf_overrides)
    device = memory.pick_device(config.device)
    max_model_len = _max_model_len(config, model)
    memory.check_tables(config, max_model_len, _rotary_sizes(model), device)
    where, library = operators.where_to_run(config, model, progress)
    packed_share = 1.0 if library is None else products.packed_share(library, where.dtype)
    log.info("%s", memory.forecast(directory, config, model, where, max_model_len, packed_share))
    ops, backend = operators.select(config, model, where, library, progress)
    vision = vision_of(config, directory)
    new_graphs = partial(graphs.select, device, library, eager=config.enforce_eager)
    return _Base(
        config=config,
        directory=directory,
        model=model,
        device=device,
        dtype=where.dtype,
        arithmetic=operators.arithmetic(where, library),
        library=library,
        ops=ops,
        backend=backend,
        planner=LinearPlanner(
            device,
            exact=config.exact,
            max_rows=_most_rows(config, vision),
            library=library,
            progress=progress,
        ),
        graphs=new_graphs(),
        new_graphs=new_graphs,
        items=ItemStore(
            model.hidden_size,
            device,
            where.dtype,
            MOST_ITEM_BYTES,
            NOTHING_ADDED if vision is None else vision.added,
        ),
        vision=vision,
        max_model_len=max_model_len,
    )


def _rotary_sizes(model: ModelConfig) -> int:
    """Sizes of a head that rotate, over all tables of the model."""
    return sum(rope.rotary_dim for rope in model.ropes)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={wanted}: the model was made for max_position_embeddings="
            f"{model.max_position_embeddings}; ask for at most that"
        )
    if config.num_kv_blocks is None:
        return wanted
    room = (config.num_kv_blocks - 1) * config.block_size
    if room < 1 or (config.max_model_len is not None and wanted > room):
        raise ValueError(
            f"num_kv_blocks={config.num_kv_blocks}: one block is kept for scrap, the others hold {room} tokens, less "
            f"than max_model_len={wanted}; raise num_kv_blocks to {-(-wanted // config.block_size) + 1} or lower "
            "max_model_len"
        )
    return min(wanted, room)


def _drafting(base: _Base, plans: Seq[DraftPlan], members: Seq[DrafterSandbox]) -> _Drafting:
    """All drafters together. Whoever stands for forced text comes last, behind those who draft on the device, whose
    numbers count from 0, and makes no pass wider than their drafts do."""
    order = sorted(range(len(plans)), key=lambda i: members[i].spec.forced)
    plans, members = [plans[i] for i in order], [members[i] for i in order]
    most = [plan.num_drafts for plan in plans]
    num_own = sum(not member.spec.forced for member in members)
    num_drafts = max(most[:num_own] or most, default=0)
    speculative = base.config.speculative_config
    is_auto = speculative is not None and speculative.is_auto
    return _Drafting(
        _joined(members[:num_own] or members, most, base.model.vocab_size),
        tuple(members),
        num_drafts,
        levels=profile.levels_up_to(num_drafts, base.device.type) if is_auto else (num_drafts,),
        identity=repr([plan.identity for plan in plans]),
        methods=tuple(plan.method for plan in plans),
        most_forced=min(num_drafts, sum(most[num_own:])),
    )


def _joined(members: Seq[DrafterSandbox], most: Seq[int], vocab_size: int) -> Drafter | None:
    """The members as one drafter. `most`: drafts that each proposes."""
    if len(members) > 1:
        return ChainDrafter(members, most[: len(members)], vocab_size)
    return members[0] if members else None


def _boxed(base: _Base, drafter: Drafter, plan: DraftPlan) -> DrafterSandbox:
    assert base.config.speculative_config is not None
    is_users = any(registry.is_custom(p.method) and not p.settings.trusted for p in (plan, *plan.inner))
    return DrafterSandbox(
        drafter,
        vocab_size=base.model.vocab_size,
        max_faults=base.config.speculative_config.max_faults,
        time_limit=base.config.speculative_config.time_limit,
        new_graphs=base.new_graphs if is_users else None,
    )


def _one_drafter(
    base: _Base, target: Decoder, target_weights: WeightSource, plan: DraftPlan, num_drafts: int
) -> Drafter:
    """What a plan asks for; with a `max_model_len` it drafts for shorter texts alone. num_drafts: the most that any
    drafter of the engine proposes."""
    settings = plan.settings
    inner = [_one_drafter(base, target, target_weights, p, num_drafts) for p in plan.inner]
    if len(inner) > 1:
        boxed = [_boxed(base, drafter, p) for drafter, p in zip(inner, plan.inner, strict=True)]
        inner = [ChainDrafter(boxed, [p.num_drafts for p in plan.inner], base.model.vocab_size)]
    ctx = DraftContext(
        config=base.config,
        own=_own_settings(base.config, plan),
        options=settings.options,
        num_drafts=plan.num_drafts,
        checkpoint=plan.checkpoint,
        target=target,
        target_weights=target_weights,
        target_directory=base.directory,
        builder=LayerBuilder(
            plan.checkpoint.weights if plan.checkpoint else target_weights,
            base.ops,
            base.planner,
            base.device,
            base.dtype,
            exact=False,
            kind=settings.quantization or DENSE,
        ),
        max_model_len=base.max_model_len,
        max_positions=base.max_model_len + num_drafts + 1,
        inner=inner[0] if inner else None,
        vision=base.vision,
    )
    drafter = registry.build(plan.method, ctx)
    if settings.image_inputs == "embeddings" and not drafter.spec.takes_embeddings:
        raise ValueError(
            f"speculative_config: image_inputs='embeddings': a drafter of method={plan.method!r} is fed none; leave it "
            "out"
        )
    log.info("%s", reporting.start_line(plan, drafter.spec, ctx))
    return drafter if settings.max_model_len is None else ShortTexts(drafter, settings.max_model_len)


def _names(methods: Seq[str]) -> tuple[str, ...]:
    """The drafters' methods; one that stands before it in a chain already gets a number."""
    number = [methods[: i + 1].count(method) for i, method in enumerate(methods)]
    return tuple(m if n == 1 else f"{m}-{n}" for m, n in zip(methods, number, strict=True))


def _own_settings(config: EngineConfig, plan: DraftPlan) -> SpeculativeConfig:
    """A drafter's, with what holds for all drafters together."""
    shared = {name: getattr(config.speculative_config, name) for name in ENGINE_WIDE}
    return dataclasses.replace(
        plan.settings, method=plan.method, num_speculative_tokens=plan.num_drafts, **shared
    )


@dataclass(frozen=True, slots=True)
class _Drafting:
    """The drafter and what the engine needs to know beside its spec."""

    drafter: Drafter | None
    members: tuple[DrafterSandbox, ...]
    num_drafts: int
    levels: tuple[int, ...]  # numbers of drafts that are asked for: K alone, or from 0 up to it
    identity: str  # what the time of drafting depends on
    methods: tuple[str, ...] = ()  # one a drafter
    most_forced: int = 0  # tokens of forced text that are drafts at once; 0: nobody asks for it

    @property
    def is_auto(self) -> bool:
        return len(self.levels) > 1

    @property
    def spec(self) -> DraftSpec:
        return self.drafter.spec if self.drafter else DraftSpec()

    @property
    def is_trusted(self) -> bool:
        """Whether every drafter is ours or trusted by the user: a pass with them is a function of device memory."""
        return all(member.is_trusted for member in self.members)


def _engine(
    base: _Base,
    target: Decoder,
    drafting: _Drafting,
    groups: Seq[memory.WindowGroup],
    progress: ProgressCallback | None,
) -> tuple[EngineCore, int]:
    """The engine, ready to run, and its graphs' bytes: on a GPU they are captured, and the cache takes what is left."""
    config, num_spare = base.config, 0
    if base.device.type == "cuda" and config.num_kv_blocks is None:
        nothing = dataclasses.replace(drafting, drafter=None, members=(), num_drafts=0, levels=(0,))
        known = drafting if drafting.is_trusted else nothing
        runner = _runner(base, target, known, groups, num_blocks=2)
        # each graph keeps logits of its own
        num_rows = sum(R * (1 + k) for R in runner.buckets for k in levels_of(R, known.levels))
        num_logits = num_rows * base.model.vocab_size
        num_spare = memory.peak_bytes(runner.rehearse) + 4 * num_logits
        num_spare += MOST_ITEM_BYTES * (1 + len(drafting.spec.embeds)) if base.vision else 0
    full = [*_full(target.kv, groups), *drafting.spec.kv]
    per_token = memory.bytes_per_token(full, base.dtype)
    num_blocks = memory.num_blocks(per_token, groups, config, base.max_model_len, base.device, num_spare)
    runner, num_graph_bytes = _runner(base, target, drafting, groups, num_blocks), 0
    if base.device.type == "cuda":
        show, free = progress or (lambda what, done, total: None), free_bytes(base.device)
        runner.warm_up(lambda done, total: show("capturing CUDA graphs", done, total))
        num_graph_bytes = max(0, free - free_bytes(base.device))
    # pages do not hold what a state was at their end
    sharing = config.enable_prefix_caching and not target.states
    scheduler = _scheduler(config, drafting, groups, num_blocks, sharing=sharing)
    policy = _policy(base, drafting, runner)
    stats = EngineStats()
    if isinstance(policy, AutoPolicy):
        batches = [n for n in BATCHES if n < config.max_num_seqs] + [config.max_num_seqs]
        stats.predictions = tuple(policy.predict(number) for number in batches)
        log.info("%s", reporting.speculation_line(stats.predictions))
    return EngineCore(runner, scheduler, policy, stats), num_graph_bytes


def _groups(base: _Base, target: Decoder, drafting: _Drafting) -> tuple[memory.WindowGroup, ...]:
    """The target's layers that see a window, by their windows; a drafter's keep everything."""
    num_lookahead = max(drafting.num_drafts, drafting.spec.lookahead)
    return memory.window_groups(
        target.kv, base.dtype, base.config, base.max_model_len, num_lookahead, base.most_rows
    )


def _full(shapes: Seq[PagedKV], groups: Seq[memory.WindowGroup]) -> list[PagedKV]:
    """The layers that are in no group."""
    windows = {group.window for group in groups}
    return [shape for shape in shapes if shape.window not in windows]


def _scheduler(
    config: EngineConfig,
    drafting: _Drafting,
    groups: Seq[memory.WindowGroup],
    num_blocks: int,
    *,
    sharing: bool,
) -> Scheduler:
    spec, num_drafts = drafting.spec, drafting.num_drafts
    pages = PageAllocator(
        num_blocks,
        config.block_size,
        sharing=sharing,
        lookahead=spec.reads_ahead if spec.kv else 0,
    )
    return Scheduler(
        pages,
        num_slots=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_lookahead=max(num_drafts, spec.lookahead),
        windows=[
            WindowPages(group.num_blocks(num_blocks), config.block_size, group.window) for group in groups
        ],
    )


def _runner(
    base: _Base,
    target: Decoder,
    drafting: _Drafting,
    groups: Seq[memory.WindowGroup],
    num_blocks: int,
) -> ModelRunner:
    config, device, spec = base.config, base.device, drafting.spec
    num_drafts = drafting.num_drafts
    state = _state(base, num_drafts, max(num_drafts, spec.lookahead), len(groups))
    tables_GSB = state.block_tables_GSB
    draft_cache = _draft_cache(base, spec, num_blocks, tables_GSB[0])
    target_cache = _target_cache(base, target, groups, num_blocks, tables_GSB)
    items = _slot_items(base, spec, num_drafts)
    memory_lent = DraftRuntime(
        ops=base.ops,
        backend=base.backend,
        cache=draft_cache.beside(target_cache, spec.borrow),
        graphs=base.graphs,
        host_looks=device.type == "cpu",
        known=KnownTokens(state.slots.tokens_SL, state.slots.length_S),
        # where steps are filled up to captured sizes, a proposal that ends early saves nothing
        price=torch.zeros(1) if spec.estimates and drafting.is_auto and device.type == "cpu" else None,
        turns=items.turns,
    )
    _bind(drafting.drafter, memory_lent)
    table = _sampling_table(base, num_drafts)
    sampler = Sampler(table, base.ops)
    # What thinks on the host must see a pass's tokens before it may propose for the next one.
    on_device = drafting.is_trusted and not spec.host_tokens and config.verification == "exact"
    return ModelRunner(
        target=target,
        ops=base.ops,
        backend=base.backend,
        cache=target_cache,
        draft_cache=draft_cache,
        state=state,
        table=table,
        verifier=_verifier(config, sampler, num_drafts),
        drafter=drafting.drafter,
        sandboxes=drafting.members,
        spec=spec,
        scorer=LogprobScorer(target, sampler),
        items=items,
        max_num_batched_tokens=base.most_rows,
        graphs=base.graphs,
        num_drafts=num_drafts,
        drafter_names=_names(drafting.methods),
        most_forced=drafting.most_forced if config.verification == "exact" else 0,
        levels=drafting.levels,
        buckets=_buckets(config, num_drafts) if device.type == "cuda" and drafting.is_trusted else (),
        mixed_sizes=mixed_sizes(config) if device.type == "cuda" and drafting.is_trusted else (),
        on_device=on_device,
        drafter_may_rest=drafting.is_trusted,
        async_depth=int(on_device and device.type == "cuda"),
        price=memory_lent.price,
        num_threads=torch.get_num_threads(),
    )


def _sampling_table(base: _Base, num_drafts: int) -> SamplingTable:
    num_seqs = base.config.max_num_seqs
    max_rows = num_seqs * (1 + num_drafts)
    return SamplingTable(num_seqs + 1, base.model.vocab_size, base.device, max_rows=max_rows)


def _slot_items(base: _Base, spec: DraftSpec, num_drafts: int) -> SlotItems:
    """What slots hold beside tokens, and where their rows stand if the target has several axes."""
    num_slots, turns = base.config.max_num_seqs + 1, None
    if any(rope.axes for rope in base.model.ropes):
        turns = Turns(torch.zeros(num_slots, dtype=torch.int64, device=base.device))
    beyond = max(num_drafts, spec.lookahead)
    own = {each: _own_store(base, each) for each in spec.embeds}
    windows_only = base.vision is not None and base.vision.family.windows_only
    return SlotItems(
        base.items,
        num_slots,
        spec.reads_ahead,
        base.device,
        turns,
        beyond,
        own=own,
        windows_only=windows_only,
    )


def _own_store(base: _Base, own: OwnEmbeddings) -> ItemStore:
    """Embeddings that a drafter makes of the target's items."""
    store = ItemStore(own.hidden_size, base.device, base.dtype, MOST_ITEM_BYTES, own.added)
    store.encoders = {"image": own.encode}
    return store


def _target_cache(
    base: _Base, target: Decoder, groups: Seq[memory.WindowGroup], num_blocks: int, tables_GSB: Tensor
) -> PagedCache:
    """Memory for the target's layers: each on its window's table, with as many blocks as there are of that; and their
    states."""
    numbers = {group.window: number for number, group in enumerate(groups, 1)}
    size, layout = base.config.block_size, base.backend.layout
    layers = list[LayerKV]()
    for shape in target.kv:
        number = numbers.get(shape.window, 0)
        held = groups[number - 1].num_blocks(num_blocks) if number else num_blocks
        layers += allocate([shape], tables_GSB[number], held, size, base.dtype, base.device, layout).layers
    return PagedCache(layers, tables_GSB[0], _states(base, target.states))


def _draft_cache(base: _Base, spec: DraftSpec, num_blocks: int, table_SB: Tensor) -> PagedCache:
    """Memory for a drafter's own layers, all on one table, and their states."""
    size, layout = base.config.block_size, base.backend.layout
    cache = allocate(spec.kv, table_SB, num_blocks, size, base.dtype, base.device, layout)
    cache.states = _states(base, spec.states)
    return cache


def _states(base: _Base, specs: Seq[StateSpec]) -> list[LayerState]:
    """Memory for states of all slots, the one of nobody included."""
    return [spec.allocate(base.config.max_num_seqs + 1, base.dtype, base.device) for spec in specs]


def _buckets(config: EngineConfig, num_drafts: int) -> tuple[int, ...]:
    """Numbers of requests: 1, 2, 4, each multiple of 8 up to 64, of 32 up to 256, and the largest there can be."""
    most = min(config.max_num_seqs, config.max_num_batched_tokens // (1 + num_drafts), 256)
    numbers = [1, 2, 4, *range(8, 65, 8), *range(96, 257, 32)]
    return tuple(sorted({n for n in numbers if n < most} | {most} - {0}))


def mixed_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of rows that products have certificates for, and the budget, which a prompt that is cut fills."""
    most = min(config.max_num_batched_tokens, MOST_MIXED_ROWS)
    return () if config.enforce_eager else (*(n for n in BUCKETS if LEAST_MIXED_ROWS <= n < most), most)


def _state(base: _Base, num_drafts: int, lookahead: int, num_windows: int) -> State:
    block_size = base.config.block_size
    return State(
        base.ops.step,
        num_slots=base.config.max_num_seqs,
        max_len=base.max_model_len,
        # rows and drafts past a sequence's limit find entries that point at the scrap page
        max_blocks=-(-base.max_model_len // block_size) + 1 + lookahead // block_size,
        num_drafts=num_drafts,
        device=base.device,
        placeholders=(-1, -1) if base.vision is None else base.vision.placeholders,
        num_tables=1 + num_windows,
    )


def _verifier(config: EngineConfig, sampler: Sampler, num_drafts: int) -> Verifier:
    if config.verification == "exact":
        return ExactVerifier(sampler)
    return LossyVerifier(sampler, config.verification, num_drafts)


def _policy(base: _Base, drafting: _Drafting, runner: ModelRunner) -> Policy:
    if not drafting.is_auto:
        return FixedPolicy(drafting.num_drafts)
    identity = {
        "environment": environment.key(base.device, base.library),
        "target": repr(base.model),
        "dtype": str(base.dtype),
        "drafter": drafting.identity,
        "sizes": [runner.max_num_seqs, runner.max_model_len, base.config.block_size],
        "eager": base.config.enforce_eager,
        "verification": base.config.verification,
        "exact": base.config.exact,
    }
    costs = profile.costs_of(runner, drafting.levels, identity, native.default_cache_dir())
    return AutoPolicy(costs, Acceptance(drafting.num_drafts))


def _bind(drafter: Drafter | None, runtime: DraftRuntime) -> None:
    """ValueError where the user's code raises; ours may say what it likes."""
    try:
        if drafter is not None:
            drafter.bind(runtime)
    except DrafterError as error:
        raise ValueError(f"speculative_config: {error}") from error
