"""The host's record of one choice of one request: what it asked for, how far it is, which pages it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftproof.cache.pages import ROOT
from draftproof.engine.text import StopChecker
from draftproof.metrics import SpeculationStats
from draftproof.types import FinishReason, SamplingParams


@dataclass(slots=True)
class LogprobRow:
    """Of one token: its id, logprob and rank, and the likeliest ids with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens are prompt and output together, as far as the host has seen them; of these `num_computed` have keys and
    values in the cache.

    A device may run ahead of the host: `num_pending` is the most tokens that passes in flight may have added since.
    `num_drafts` draft tokens lie beyond the known ones in the device's table, waiting to be verified; an upper bound
    while a pass is in flight.
    """

    request_id: str
    index: int
    arrival: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    row_seed: int
    limit: int  # most tokens it may grow to: min(max_model_len, prompt + max_tokens)
    stop_ids: frozenset[int]
    checker: StopChecker
    reads_prefix_cache: bool = True  # prompt logprobs need every prompt row computed, and so does probing
    bad_words_ids: list[list[int]] = field(default_factory=list)

    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_drafts: int = 0
    num_registered: int = 0  # pages of `blocks` that the prefix cache knows
    node: int = ROOT  # id of the last registered page
    draft_broken: bool = False  # its draft KV has a hole: never ask the drafter for it again
    num_preemptions: int = 0
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    none_left: bool = False  # finished with an error: what its request asks for ruled every token out
    accept_rate: float | None = None  # the policy's estimate; None until something was verified
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)  # of prompt tokens 1..
    num_scored: int = 0  # prompt tokens whose logprobs are here or under way

    @property
    def num_to_compute(self) -> int:
        """Known tokens whose rows are still to come: after a pass that samples it is always one."""
        return 1 if self.num_pending else len(self.tokens) - self.num_computed

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.index == 0
