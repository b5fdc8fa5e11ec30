"""Access to an engine's internals for benchmarks; the only file of them that depends on the engine's structure.

Shapes: T rows, R requests, M rows that are sampled.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention, Rows
from draftproof.drafters.base import Drafter, Verified
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.replay import ReplayDrafter
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.engine.acceptance import Acceptance
from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.chain_policy import ChainPolicy
from draftproof.engine.costs import StepOutcome
from draftproof.engine.interface import ScheduledRequest
from draftproof.engine.policy import FixedPolicy, Policy, learn_each
from draftproof.engine.progress import Progress, Round
from draftproof.engine.runner import ModelRunner, Pass
from draftproof.engine.shapes import BatchShape, mixed_sizes
from draftproof.frontend.llm import LLM
from draftproof.frontend.output_processor import Request
from draftproof.models.config import ModelConfig
from draftproof.runtime.graphs import EAGER, Recorded
from draftproof.types import Delta, RequestOutput, SamplingParams

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Clock:
    """An engine's own counters: steps, their seconds by part, and faults of its drafter.

    `target`, `draft`: 0 if the host does not see the device's times. The other four add up to the host's step.
    """

    steps: int = 0
    target: float = 0.0
    draft: float = 0.0
    planning: float = 0.0
    launch: float = 0.0
    waiting: float = 0.0
    results: float = 0.0
    faults: int = 0

    def __add__(self, other: Clock) -> Clock:
        return Clock(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Clock) -> Clock:
        return Clock(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def clock(llm: LLM) -> Clock:
    """The engine's own counters now."""
    stats = llm.stats
    return Clock(
        steps=stats.num_steps,
        target=stats.target_seconds,
        draft=stats.draft_seconds,
        planning=stats.planning_seconds,
        launch=stats.launch_seconds,
        waiting=stats.waiting_seconds,
        results=stats.results_seconds,
        faults=stats.num_drafter_faults,
    )


class Stepper:
    """An engine driven step by step: requests may be added between steps, which `LLM.generate` does not offer."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._queue = llm.requests
        self._requests: dict[str, Request] = {}

    def add(self, prompt_token_ids: list[int], params: SamplingParams) -> str:
        """Queue a request; returns its id. Raises ValueError if it cannot be served."""
        request = self._queue.add({"prompt_token_ids": prompt_token_ids}, params)
        self._requests[request.request_id] = request
        return request.request_id

    def step(self) -> list[Delta]:
        """Run one step; returns the deltas of the requests added here."""
        self._queue.step()
        deltas: list[Delta] = []
        for request in self._requests.values():
            deltas += request.pending
            request.pending.clear()
        return deltas

    def output(self, request_id: str) -> RequestOutput:
        return self._queue.output(self._requests[request_id])

    def close(self, request_id: str) -> None:
        """Forget a request, aborting it if it still runs."""
        self._queue.close(request_id)
        self._requests.pop(request_id, None)

    def clock(self) -> Clock:
        return clock(self._llm)


def model_of(llm: LLM) -> ModelConfig:
    """The target's config."""
    return llm.model_config


def keys_of(llm: LLM) -> Tensor:
    """Key cache of the target's first layer, which has the engine's device and dtype."""
    return _runner(llm).cache.layers[0].k


def drafter_of(llm: LLM) -> Drafter | None:
    """The drafter without its sandbox, or the chain."""
    drafter = _runner(llm).drafter
    return drafter.drafter if isinstance(drafter, DrafterSandbox) else drafter


def runs_ahead(llm: LLM) -> bool:
    """Whether passes are in flight between steps, so that the host's clock cannot time them."""
    return bool(llm.core.runner.async_depth)


def fill_cache(llm: LLM, num_requests: int, context: int) -> None:
    """Assign blocks for `context` tokens to requests 0, 1, ..., and fill every cache with noise."""
    p = _runner(llm)
    each = -(-context // llm.config.block_size)
    width = p.state.block_table_SB.shape[1]
    fits = each <= width and num_requests * each < llm.core.scheduler.pages.num_blocks
    assert fits, "the cache has no room for that"
    blocks_RB = 1 + torch.arange(num_requests * each, device=p.state.device).view(num_requests, each)
    for layer in (*p.cache.layers, *p.draft_cache.layers):
        # layers with a window have fewer blocks, so far pages share blocks
        layer.block_table_SB[:num_requests, :each] = (blocks_RB - 1) % (len(layer.k) - 1) + 1
        layer.k[: num_requests * each + 1].normal_()
        layer.v[: num_requests * each + 1].normal_()


class TargetPass:
    """The target pass of a step: `rows` rows for each of `num_requests`, from position `context` on.

    `last_only`: logits only of each request's last row, as for a prompt.
    """

    def __init__(
        self, llm: LLM, rows: int, context: int, num_requests: int = 1, *, last_only: bool = False
    ) -> None:
        self._runner, self._most_rows = _runner(llm), 0 if last_only else rows
        self._key = ("measured target", rows, num_requests, last_only)
        device = self._runner.state.device
        self.positions_T = torch.arange(context, context + rows, device=device).repeat(num_requests)
        self.slots_T = torch.arange(num_requests, device=device).repeat_interleave(rows)
        self.tokens_T = torch.arange(10, 10 + rows * num_requests, device=device)
        first, step = (rows - 1, rows) if last_only else (0, 1)
        sampled_M = torch.arange(first, rows * num_requests, step, device=device)
        self._inputs = (self.tokens_T, self.positions_T, self.slots_T, self.positions_T + 1, sampled_M)

    def __call__(self) -> tuple[Tensor, ...]:
        """(logits, tapped states), computed eagerly."""
        return self._compute(*self._inputs)

    def repeat(self) -> tuple[Tensor, ...]:
        """The pass as the engine replays it: from the second call on as one graph or recorded program."""
        return self._runner.graphs.run(self._key, self._compute, self._inputs)

    def calls_of(self, operators: Mapping[str, Sequence[str]]) -> dict[str, Call]:
        """The calls of only some compiled operators, after `repeat`; empty if nothing was recorded."""
        graphs = self._runner.graphs
        program = graphs.program(self._key) if isinstance(graphs, Recorded) else None
        return {} if program is None else {name: program.part(own) for name, own in operators.items()}

    def _compute(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        context_lens_T: Tensor,
        sampled_M: Tensor,
    ) -> tuple[Tensor, ...]:
        p = self._runner
        rows = Rows(positions_T, slots_T, context_lens_T, max_query_len=self._most_rows)
        attn = PagedAttention(p.ops, p.backend, p.cache, rows)
        out = p.target(tokens_T, attn, p.spec.taps.layers, p.spec.taps.final)
        return (p.target.logits(p.ops.gather(out.hidden_TH, sampled_M)), *out.taps)


def draft_pass(llm: LLM, context: int, num_drafts: int) -> Call:
    """The draft pass after a round with `num_drafts` + 1 rows of request 0, of which 3 survived."""
    p, target, drafter = _runner(llm), TargetPass(llm, num_drafts + 1, context), drafter_of(llm)
    assert drafter is not None

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, device=p.state.device)

    slots_R = numbers(0)
    verified = Verified(
        tokens_T=target.tokens_T,
        positions_T=target.positions_T,
        query_start_loc_R1=numbers(0, num_drafts + 1),
        slots_R=slots_R,
        live_R=numbers(3),
        next_R=numbers(7),
        k_R=numbers(num_drafts),
        taps=target()[1:],
        draw=p.verifier.drawer(slots_R, numbers(context + 4)),
        history=lambda _: torch.zeros(0, dtype=torch.int32),
    )
    return partial(drafter.propose, verified, num_drafts)


@contextlib.contextmanager
def using(llm: LLM, policy: Policy) -> Iterator[None]:
    """Context manager that replaces the engine's policy."""
    engine, before = llm.core, llm.core.policy
    engine.policy = policy
    try:
        yield
    finally:
        engine.policy = before


def compares_drafts(llm: LLM) -> bool:
    """Whether drafts are compared with the output, if the policy wants that."""
    return llm.core.drafting.can_compare


@contextlib.contextmanager
def comparing(llm: LLM, policy: Policy) -> Iterator[None]:
    """Context manager for a policy that has drafts compared with the output, also those of a model: on a CPU, where the
    host knows them."""
    drafting = llm.core.drafting
    before, drafting.can_compare = drafting.can_compare, True
    try:
        with using(llm, policy):
            yield
    finally:
        drafting.can_compare = before
        drafting.use(drafting.policy)


def asking_for(llm: LLM, num_drafts: int) -> contextlib.AbstractContextManager[None]:
    """Context manager for a fixed number of drafts; 0: plain decoding, in which the drafter sees no rows."""
    return using(llm, FixedPolicy(num_drafts))


@contextlib.contextmanager
def captured_step(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams
) -> Iterator[tuple[Call, Call] | None]:
    """Context manager with (a whole decoding step of these requests, the step without drafts), each a graph that can be
    replayed repeatedly. None if no such step was captured.

    Their effects on the device are discarded at the end.
    """
    engine, runner, queue = llm.core, _runner(llm), llm.requests
    num_requests = next((R for R in runner.shapes.buckets if len(prompts) <= R), 0)
    shape = BatchShape.decoding(num_requests, 1 + runner.num_drafts, runner.num_drafts)
    if shape not in runner.captured:
        yield None
        return
    requests = [queue.add({"prompt_token_ids": ids}, params) for ids in prompts]
    try:
        while not all(request.choices[0].token_ids or request.finished for request in requests):
            queue.step()
        for choice in (request.choices[0] for request in requests):
            if choice.error is not None:
                raise RuntimeError(f"a step to be measured cannot be computed: {choice.error}")
        engine.drain()
        running = engine.scheduler.running
        if len(running) < len(requests):
            yield None  # outputs of one token have no decoding steps
            return
        each = shape.most_sampled
        scheduled = [ScheduledRequest(r.slot, r.num_computed, each, each, shape.num_drafts) for r in running]
        scheduled_4R = runner.state.load(scheduled, shape)

        def half(scheduled_4R: Tensor) -> tuple[Tensor, ...]:
            return (runner.verify_rows(Pass(shape, scheduled_4R)).result.tokens_RW,)

        runner.graphs.prepare(("first half", shape), half, (scheduled_4R,))
        full_step = partial(runner.step_tensors, shape)
        yield (
            partial(runner.graphs.run, ("step", shape), full_step, (scheduled_4R,)),
            partial(runner.graphs.run, ("first half", shape), half, (scheduled_4R,)),
        )
    finally:
        for request in requests:
            queue.close(request.request_id)
        engine.recompute_all()  # the device's state is ahead of the host's


@contextlib.contextmanager
def steps_of(llm: LLM, most_rows: int, *, is_captured: bool) -> Iterator[None]:
    """Context manager that limits a step to `most_rows`. `is_captured` False: steps with prompts are not padded to
    recorded sizes, and draft without recorded or captured passes."""
    scheduler, runner, heads = llm.core.scheduler, _runner(llm), _heads(drafter_of(llm))
    before = scheduler.max_num_batched_tokens, runner.shapes.mixed
    runtimes = [head.runtime for head in heads]
    scheduler.max_num_batched_tokens = most_rows
    if not is_captured:
        runner.shapes.mixed = ()
    elif runner.shapes.mixed:
        runner.shapes.mixed = mixed_sizes(dataclasses.replace(llm.config, max_num_batched_tokens=most_rows))
    try:
        for head, runtime in zip(heads, runtimes, strict=True):
            if runtime is not None and not is_captured:
                head.bind(dataclasses.replace(runtime, graphs=EAGER))
        yield
    finally:
        scheduler.max_num_batched_tokens, runner.shapes.mixed = before
        for head, runtime in zip(heads, runtimes, strict=True):
            if runtime is not None:
                head.bind(runtime)


def _heads(drafter: Drafter | None) -> list[HeadDrafter]:
    """The drafter, or replay's inner one, if it is a `HeadDrafter`; else empty."""
    inner = drafter.inner if isinstance(drafter, ReplayDrafter) else drafter
    return [inner] if isinstance(inner, HeadDrafter) else []


def _runner(llm: LLM) -> ModelRunner:
    runner = llm.core.runner
    assert isinstance(runner, ModelRunner)
    return runner


class AskingAnyway(AutoPolicy):
    """A policy that always asks for as many drafts, while costs and acceptance are measured."""

    num_asked: int | None = None  # drafts of each request; None: the maximum

    @property
    def compares(self) -> bool:
        """Never: which drafts are made depends on where rounds end, so on what is verified."""
        return False

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        return [self.costs.levels[-1] if self.num_asked is None else self.num_asked] * len(asked)

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        return self.num_asked != 0

    def learn(self, request: Progress, rounds: Sequence[Round]) -> None:
        """Each counts, and as much at an output's beginning as later."""
        learn_each(self, request, rounds)


class AskingTogether(AskingAnyway):
    """Counts nothing but decode-only steps of `num_together` requests, and the drafts that are verified in these."""

    num_together = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # by `id` of the request: of the step before, of this one; (request, drafts asked for, proposed)
        self._before: dict[int, tuple[Progress, int, int]] = {}
        self._made: dict[int, tuple[Progress, int, int]] = {}
        self._verified: list[tuple[Progress, int, int]] = []  # (request, drafts, accepted)

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        self._begin()  # the step before may have had prompts, so that nobody was told
        return super().choose(asked, num_others, num_joining)

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool = True) -> None:
        self._made[id(request)] = request, num_asked, num_drafts

    def verified(
        self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool = True
    ) -> None:
        self._verified.append((request, num_drafted, num_accepted))

    def finished(self, step: StepOutcome, num_steps: int = 0) -> None:
        if step.num_requests == self.num_together:
            for request, num_asked, num_drafts in self._before.values():
                super().proposed(request, num_asked, num_drafts)
            for request, num_drafts, num_accepted in self._verified:
                super().verified(request, num_drafts, num_accepted)
        self._before.clear()
        self._begin()

    def _begin(self) -> None:
        self._before.update(self._made)
        self._made.clear()
        self._verified.clear()


class AskingLookups(ChainPolicy):
    """A chain's policy that asks its lookups anyway, and has all of their drafts verified."""

    compares = False

    def learn(self, request: Progress, rounds: Sequence[Round]) -> None:
        self.lookups.learn(request, rounds)


Asking = AskingAnyway | ChainPolicy  # a chain policy of two that ask anyway


def matches(llm: LLM) -> list[Tensor]:
    """A copy of what an n-gram drafter has learned of its drafts; empty for other drafters."""
    drafter = drafter_of(llm)
    return [kept.clone() for kept in drafter.record.tensors] if isinstance(drafter, NgramDrafter) else []


def set_matches(llm: LLM, learned: Sequence[Tensor]) -> None:
    """Let an n-gram drafter know this of its drafts, or nothing."""
    drafter = drafter_of(llm)
    if isinstance(drafter, NgramDrafter):
        drafter.record.clear()
        for kept, found in zip(drafter.record.tensors, learned, strict=False):
            kept.copy_(found)


def asking_anyway(llm: LLM) -> Asking:
    """A policy for measuring: acceptance starts without data and never decays."""
    auto = llm.core.policy
    if isinstance(auto, ChainPolicy):
        return ChainPolicy(_asking(auto.lookups), _asking(auto.models))
    assert isinstance(auto, AutoPolicy)
    return _asking(auto)


def asking_together(llm: LLM, num_together: int, num_asked: int, *, of_lookups: bool = False) -> Asking:
    """A policy that measures acceptance in steps of so many requests, with so many drafts of each; `of_lookups`: of a
    chain's lookups, and none of its other members'; else of these alone."""
    auto = llm.core.policy
    if isinstance(auto, ChainPolicy):
        lookups = together(auto.lookups, num_together, num_asked * of_lookups)
        models = together(auto.models, num_together, num_asked * (not of_lookups))
        return (AskingLookups if of_lookups else ChainPolicy)(lookups, models)
    assert isinstance(auto, AutoPolicy)
    return together(auto, num_together, num_asked)


def _asking(auto: AutoPolicy) -> AskingAnyway:
    return AskingAnyway(auto.costs, Acceptance(auto.acceptance.num_drafts, memory=1.0), number=auto.number)


def together(auto: AutoPolicy, num_together: int, num_asked: int) -> AskingTogether:
    """A policy with these costs that measures acceptance, see `AskingTogether`."""
    acceptance = Acceptance(auto.acceptance.num_drafts, memory=1.0)
    found = AskingTogether(auto.costs, acceptance, number=auto.number)
    found.num_together, found.num_asked = num_together, num_asked
    return found


def part_of(policy: Policy, *, of_lookups: bool) -> AutoPolicy:
    """The policy, or if it is a chain's the one of its lookups, or of its models."""
    if isinstance(policy, ChainPolicy):
        return policy.lookups if of_lookups else policy.models
    assert isinstance(policy, AutoPolicy)
    return policy


def knowing(auto: Policy, asked: Asking) -> AutoPolicy | ChainPolicy:
    """A policy with the costs that `auto` has learned and the acceptance that was measured by `asked`."""
    if isinstance(auto, ChainPolicy):
        assert isinstance(asked, ChainPolicy)
        lookups = AutoPolicy(auto.lookups.costs, asked.lookups.acceptance)
        return ChainPolicy(lookups, AutoPolicy(auto.models.costs, asked.models.acceptance))
    assert isinstance(auto, AutoPolicy) and isinstance(asked, AutoPolicy)
    return AutoPolicy(auto.costs, asked.acceptance)
