"""Assembles an engine from a target and its drafters: sizes the caches, makes runner, scheduler and policy."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Sequence as Seq

import torch

from draftproof.cache.pages import PageAllocator
from draftproof.cache.windows import WindowPages
from draftproof.config import EngineConfig
from draftproof.drafters.base import Drafter, DraftRuntime, KnownTokens
from draftproof.drafters.contained import DrafterError
from draftproof.engine import profile, reporting
from draftproof.engine.acceptance import acceptance_of
from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.chain_policy import ChainPolicy
from draftproof.engine.core import EngineCore
from draftproof.engine.costs import DraftCosts, StepCosts, levels_of
from draftproof.engine.drafting import can_compare
from draftproof.engine.interface import RowPrice
from draftproof.engine.loading import caches, memory
from draftproof.engine.loading.base import MOST_ITEM_BYTES, Base, ProgressCallback
from draftproof.engine.loading.drafters import Drafters
from draftproof.engine.logprobs import LogprobScorer
from draftproof.engine.measuring import StepMeter
from draftproof.engine.policy import FixedPolicy, Policy
from draftproof.engine.runner import ModelRunner
from draftproof.engine.scheduler import Scheduler
from draftproof.engine.shapes import Shapes, mixed_sizes, numbers_of_requests
from draftproof.engine.state import State
from draftproof.metrics import EngineStats
from draftproof.models.decoder import Decoder
from draftproof.runtime import environment, native
from draftproof.runtime.room import free_bytes
from draftproof.runtime.transfer import Numbers
from draftproof.sampling.lossy import LossyVerifier
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.sampler import Sampler
from draftproof.sampling.verifier import ExactVerifier, Verifier

log = logging.getLogger(__name__)
# numbers of requests for which speed-ups are predicted
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def make_engine(
    base: Base,
    target: Decoder,
    drafters: Drafters,
    groups: Seq[memory.WindowGroup],
    progress: ProgressCallback | None,
) -> tuple[EngineCore, int]:
    """(the engine, ready to run; bytes of its CUDA graphs). On a GPU the cache gets the memory that weights, graphs
    and activations leave."""
    config, num_spare = base.config, 0
    if base.device.type == "cuda" and config.num_kv_blocks is None:
        nothing = dataclasses.replace(drafters, drafter=None, members=(), num_drafts=0, levels=(0,))
        known = drafters if drafters.is_trusted else nothing
        runner = _runner(base, target, known, groups, num_blocks=2)
        # each graph holds logits of its own
        num_rows = sum(R * (1 + k) for R in runner.shapes.buckets for k in levels_of(R, known.levels))
        num_logits = num_rows * base.model.vocab_size
        num_spare = memory.peak_bytes(runner.rehearse) + 4 * num_logits
        num_spare += MOST_ITEM_BYTES * (1 + len(drafters.spec.embeds)) if base.vision else 0
    full = [*caches.full_layers(target.kv, groups), *drafters.spec.kv]
    per_token = memory.bytes_per_token(full, base.dtype)
    num_blocks = memory.num_blocks(per_token, groups, config, base.max_model_len, base.device, num_spare)
    runner, num_graph_bytes = _runner(base, target, drafters, groups, num_blocks), 0
    if base.device.type == "cuda":
        show, free = progress or (lambda what, done, total: None), free_bytes(base.device)
        runner.warm_up(lambda done, total: show("capturing CUDA graphs", done, total))
        num_graph_bytes = max(0, free - free_bytes(base.device))
    # a page does not record the state at its end, so prefixes of targets with states cannot be shared
    sharing = config.enable_prefix_caching and not target.states
    scheduler = _scheduler(config, drafters, groups, num_blocks, sharing=sharing)
    policy = _policy(base, drafters, runner)
    stats = EngineStats()
    if isinstance(policy, AutoPolicy | ChainPolicy):
        batches = [n for n in BATCHES if n < config.max_num_seqs] + [config.max_num_seqs]
        stats.predictions = tuple(policy.predict(number) for number in batches)
        log.info("%s", reporting.speculation_line(stats.predictions))
    return EngineCore(runner, scheduler, policy, stats), num_graph_bytes


def _scheduler(
    config: EngineConfig,
    drafters: Drafters,
    groups: Seq[memory.WindowGroup],
    num_blocks: int,
    *,
    sharing: bool,
) -> Scheduler:
    spec, num_drafts = drafters.spec, drafters.num_drafts
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
    base: Base,
    target: Decoder,
    drafters: Drafters,
    groups: Seq[memory.WindowGroup],
    num_blocks: int,
) -> ModelRunner:
    config, device, spec = base.config, base.device, drafters.spec
    num_drafts = drafters.num_drafts
    state = _state(base, num_drafts, max(num_drafts, spec.lookahead), len(groups))
    tables_GSB = state.block_tables_GSB
    draft_cache = caches.draft_cache(base, spec, num_blocks, tables_GSB[0])
    target_cache = caches.target_cache(base, target, groups, num_blocks, tables_GSB)
    items = caches.slot_items(base, spec, num_drafts)
    memory_lent = DraftRuntime(
        ops=base.ops,
        backend=base.backend,
        cache=draft_cache.beside(target_cache, spec.borrow),
        graphs=base.graphs,
        host_looks=device.type == "cpu",
        known=KnownTokens(state.slots.tokens_SL, state.slots.length_S),
        # where steps are padded to captured sizes, a proposal that ends early saves nothing
        price=torch.zeros(len(RowPrice._fields))
        if spec.estimates and drafters.is_auto and device.type == "cpu"
        else None,
        turns=items.turns,
    )
    _bind(drafters.drafter, memory_lent)
    table = _sampling_table(base, num_drafts)
    sampler = Sampler(table, base.ops)
    # A drafter on the host must see a pass's tokens before it can propose for the next one.
    on_device = drafters.is_trusted and not spec.host_tokens and config.verification == "exact"
    return ModelRunner(
        target=target,
        ops=base.ops,
        backend=base.backend,
        cache=target_cache,
        draft_cache=draft_cache,
        state=state,
        table=table,
        verifier=_verifier(config, sampler, num_drafts),
        drafter=drafters.drafter,
        sandboxes=drafters.members,
        spec=spec,
        scorer=LogprobScorer(target, sampler),
        items=items,
        max_num_batched_tokens=base.most_rows,
        graphs=base.graphs,
        shapes=_shapes(base, drafters, on_device=on_device),
        num_drafts=num_drafts,
        drafter_names=drafters.names,
        most_forced=drafters.most_forced if config.verification == "exact" else 0,
        on_device=on_device,
        drafter_may_rest=drafters.is_trusted,
        lookups=frozenset(drafters.lookups),
        is_divided=0 < len(drafters.lookups) < drafters.num_own,
        async_depth=int(on_device and device.type == "cuda"),
        price=None if memory_lent.price is None else Numbers(memory_lent.price),
        num_threads=torch.get_num_threads(),
    )


def _sampling_table(base: Base, num_drafts: int) -> SamplingTable:
    num_seqs = base.config.max_num_seqs
    max_rows = num_seqs * (1 + num_drafts)
    return SamplingTable(num_seqs + 1, base.model.vocab_size, base.device, max_rows=max_rows)


def _shapes(base: Base, drafters: Drafters, *, on_device: bool) -> Shapes:
    spec, num_drafts = drafters.spec, drafters.num_drafts
    has_model = spec.kv or spec.borrow or spec.taps.layers or spec.taps.final
    is_captured = base.device.type == "cuda" and drafters.is_trusted
    return Shapes(
        num_drafts=num_drafts,
        max_model_len=base.max_model_len,
        has_drafter=drafters.drafter is not None,
        max_num_seqs=base.config.max_num_seqs,
        costs_alike=on_device and not has_model,
        only_lookups=0 < len(drafters.lookups) == drafters.num_own,
        levels=drafters.levels,
        buckets=numbers_of_requests(base.config, num_drafts) if is_captured else (),
        mixed=mixed_sizes(base.config) if is_captured else (),
    )


def _state(base: Base, num_drafts: int, lookahead: int, num_windows: int) -> State:
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


def _policy(base: Base, drafters: Drafters, runner: ModelRunner) -> Policy:
    if not drafters.is_auto:
        return FixedPolicy(drafters.num_drafts)
    identity = {
        "environment": environment.key(base.device, base.library),
        "target": repr(base.model),
        "dtype": str(base.dtype),
        "drafter": drafters.identity,
        "sizes": [runner.max_num_seqs, runner.max_model_len, base.config.block_size],
        "eager": base.config.enforce_eager,
        "verification": base.config.verification,
        "exact": base.config.exact,
    }
    meter = StepMeter(runner)
    costs = profile.costs_of(meter, drafters.levels, identity, native.default_cache_dir())
    has_kv, is_lookup = runner.drafter_has_kv, can_compare(runner) and not costs.is_padded
    specs = [drafters.members[number].spec for number in drafters.lookups]
    is_cut = is_lookup and all(spec.estimates and not spec.stops for spec in specs)
    stops = runner.drafter_stops
    if is_lookup and runner.is_divided:
        return _chain_policy(costs, profile.lookup_costs(meter, costs), drafters, is_cut=is_cut, stops=stops)
    acceptance = acceptance_of(drafters.num_drafts, has_kv=has_kv, stops=stops)
    is_timed = not runner.async_depth and not costs.is_padded  # each pass by the host's clock
    return AutoPolicy(costs, acceptance, is_lookup=is_lookup, probes=is_timed, is_cut=is_cut, stops=stops)


def _chain_policy(
    costs: StepCosts, lookups: DraftCosts, drafters: Drafters, *, is_cut: bool, stops: bool
) -> ChainPolicy:
    """The policy of a chain of lookups and others. `costs`: with the drafts of the others; `lookups`: of drafts of the
    lookups alone."""
    of_lookups, of_models = copy.deepcopy(costs), copy.deepcopy(costs)
    of_lookups.draft = lookups
    most = max(drafters.most[i] for i in range(drafters.num_own) if i not in drafters.lookups)
    of_models.levels = (*(k for k in costs.levels if k < most), most)
    return ChainPolicy(
        AutoPolicy(
            of_lookups,
            acceptance_of(drafters.num_drafts, has_kv=False),
            is_lookup=True,
            probes=True,
            is_cut=is_cut,
        ),
        AutoPolicy(
            of_models,
            acceptance_of(most, has_kv=True, stops=stops),
            number=1,
            stops=stops,
        ),
    )


def _bind(drafter: Drafter | None, runtime: DraftRuntime) -> None:
    """Bind the drafter. ValueError if a user's drafter raises; exceptions of built-in ones pass through."""
    try:
        if drafter is not None:
            drafter.bind(runtime)
    except DrafterError as error:
        raise ValueError(f"speculative_config: {error}") from error
