"""Rehearses policies on recorded drafts, without a model: a cell takes a second, and is the same in each run.

    PYTHONPATH=src:. python bench/rehearse.py --record FILE --model MODEL --drafter '{"method": "ngram"}'
    PYTHONPATH=src:. python bench/rehearse.py FILE FILE --batches 1,4,16,64

A recording holds the costs of steps as the engine's profile found them, and for each position of some texts how many
drafts the drafter has there and how many of them are right. A policy then decodes these texts: a step takes the time
that these costs say, with some noise, and making a choice takes `CHOOSING` more, unless steps are captured: there it is
made while one runs. So causes can be told apart by changing one thing. How long steps really take is not known here:
`bench/adaptive.py` measures that.

--record: decodes the prompts (with --changing also noise, after them) once to warm up and once to record, on a CPU.
Exit status 1 if `auto` reaches less than 0.97 of plain decoding or 0.95 of the best fixed number in any cell.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.adaptive import FIXED_BOUND, PLAIN_BOUND, noise_prompts, real_prompts
from bench.rules import AverageAcceptance, table_up_to
from draftproof import LLM, SamplingParams
from draftproof.bench import internals
from draftproof.drafters.base import Drafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.acceptance import acceptance_of
from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.costs import StepCosts, StepOutcome
from draftproof.engine.drafting import COMPARED_EVERY, FOLLOWED_EVERY, num_followed
from draftproof.engine.host_costs import HostCosts
from draftproof.engine.interface import RequestSpec, RowPrice
from draftproof.engine.policy import FixedPolicy, Policy
from draftproof.engine.progress import Progress, Round
from draftproof.engine.shadows import Shadow, compare_all
from draftproof.kernels.confidence.record import MOST_MATCHED, Branching, MatchRecord
from draftproof.kernels.confidence.reference import chances_of, num_paying
from draftproof.kernels.lookup.reference import lookup_torch

CHOOSING = 200e-6  # seconds of a choice, with the reports before it: measured between passes of a small model
NOISE = 0.03  # standard deviation of a step's time, relative
NUM_TOKENS = 100  # of each request
TOKEN, OTHER = 0, 1  # each token of a text, and a draft that is wrong
TURNS = {1: 32, 4: 12, 16: 6, 64: 4}  # by batch size


class Found(NamedTuple):
    """Drafts at one position: how many there are, how many of them are right, and how many tokens before them match
    those before where they were copied from; 0: not copied."""

    num_drafts: int
    num_right: int
    num_matched: int = 0


@dataclass(frozen=True)
class Text:
    """One request: prompt tokens, and the drafts by number of output tokens before them."""

    num_prompt: int
    drafts: dict[int, Found]


@dataclass(frozen=True)
class Recording:
    """`is_compared`: the engine compares this drafter's drafts with the output; `has_kv`: it must see every row;
    `buckets`: as in `StepCosts`; `prompts_together`: that a step computes, 0: all before the first step."""

    levels: tuple[int, ...]
    costs: dict[str, Any]
    host_seconds: float
    is_compared: bool
    has_kv: bool
    texts: list[Text]
    buckets: tuple[int, ...] = ()
    prompts_together: int = 0

    @property
    def is_copied(self) -> bool:
        """Whether the drafter copies drafts and ends those that do not pay."""
        return any(found.num_matched for text in self.texts for found in text.drafts.values())

    def step_costs(self) -> StepCosts:
        found = StepCosts(self.levels, self.buckets)
        found.read_json(self.costs)
        found.host = HostCosts(self.host_seconds)
        return found

    def as_json(self) -> dict[str, Any]:
        texts = [{"num_prompt": t.num_prompt, "drafts": t.drafts} for t in self.texts]
        return {**vars(self), "texts": texts}

    @classmethod
    def read(cls, file: Path) -> Recording:
        raw = json.loads(file.read_text())
        raw["levels"], raw["buckets"] = tuple(raw["levels"]), tuple(raw.get("buckets", ()))
        raw["texts"] = [
            Text(text["num_prompt"], {int(at): Found(*found) for at, found in text["drafts"].items()})
            for text in raw["texts"]
        ]
        return cls(**raw)


class Recorder(FixedPolicy):
    """Has drafts made after every token, and verifies none."""

    compares = True
    report_every = 1

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(0)
        self._most = costs.levels[-1]
        self._drafts: dict[str, tuple[Progress, dict[int, Sequence[int]]]] = {}
        self.host_seconds: list[float] = []

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        for request in asked:
            _, drafts = self._drafts.setdefault(request.id, (request, {}))
            drafts |= {shadow.start: shadow.drafts for shadow in request.shadows}
        return [0] * len(asked)

    def shadows(self, chosen: Sequence[int], num_others: int) -> list[int]:
        return [self._most] * len(chosen)

    def num_repeats(self) -> int:
        return 0

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        return True

    def finished(self, step: StepOutcome) -> None:
        self.host_seconds.append(step.host_seconds)

    def texts(self, drafter: Drafter | None) -> Iterator[Text]:
        for request, drafts in self._drafts.values():
            found = {}
            for start, its in drafts.items():
                shadow = Shadow(start, its, len(its))
                shadow.compare(request.tokens)
                num_matched = _num_matched(drafter, request.tokens[:start])
                found[start - request.num_prompt] = Found(len(its), shadow.num_accepted, num_matched)
            yield Text(request.num_prompt, found)


def _num_matched(drafter: Drafter | None, tokens: Sequence[int]) -> int:
    """Number of tokens that match before the drafts of an n-gram drafter; 0 for other drafters."""
    if not isinstance(drafter, NgramDrafter):
        return 0
    first, options = torch.zeros(1, dtype=torch.int64), drafter.options
    tokens_SL, length_S = torch.tensor([tokens], dtype=torch.int32), torch.tensor([len(tokens)])
    most_matched = max(options.longest, MOST_MATCHED)
    *_, matched_R = lookup_torch(
        tokens_SL, length_S, first, first, 1, options.shortest, options.longest, most_matched
    )
    return min(MOST_MATCHED, int(matched_R))


def record(model: str | None, config: dict[str, Any], prompts: Path | None, *, changing: bool) -> Recording:
    llm = LLM(model, max_num_seqs=1, enable_prefix_caching=False, speculative_config=config, device="cpu")
    ids = real_prompts(llm, prompts)
    if changing:
        ids += noise_prompts(llm, len(ids))
    policy = llm.core.policy
    assert isinstance(policy, AutoPolicy)
    is_compared = internals.compares_drafts(llm)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    for _ in range(2):  # a drafter that keeps texts knows these ones then
        recorder = Recorder(policy.costs)
        with internals.comparing(llm, recorder):
            llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
    return Recording(
        policy.costs.levels,
        policy.costs.as_json(),
        statistics.median(recorder.host_seconds),
        is_compared,
        llm.core.runner.drafter_has_kv,
        list(recorder.texts(internals.drafter_of(llm))),
    )


class Rehearsed(AutoPolicy):
    """Choosing takes `CHOOSING`, however fast this machine is. `matches`: what the drafter has learned."""

    num_choices = 0
    matches: MatchRecord

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        before = self._kept
        found = super().choose(asked, num_others, num_joining)
        if self._kept is not before:
            self.num_choices += 1
            self._choosing_seconds = CHOOSING
        return found


@dataclass
class Decoding:
    """A request that decodes. `num_drafts`: waiting to be verified, of `num_asked` that were asked for; `has_hole`: the
    drafter missed some of its rows; `last`: the last drafts that were copied, and the number of tokens before them."""

    text: Text
    progress: Progress
    num_drafts: int = 0
    num_asked: int = 0
    last: tuple[Found, int] | None = None
    has_hole: bool = False

    @property
    def found(self) -> Found:
        return self.text.drafts.get(self.progress.num_outputs, Found(0, 0))


class Turn:
    """A policy decodes some texts together. `seconds` so far, without steps that have nothing but prompts."""

    def __init__(
        self, policy: Policy, recording: Recording, texts: Sequence[Text], generator: random.Random
    ) -> None:
        self._policy = policy
        self._recording = recording
        self._is_copied = recording.is_copied
        self._costs = recording.step_costs()
        self._generator = generator
        self._compares = recording.is_compared and policy.compares
        self.running = [self._started(number, text) for number, text in enumerate(texts)]
        self._waiting: list[Decoding] = []  # their prompts are not computed yet
        self.seconds = 0.0
        self._num_steps = 0
        self._num_tokens = self._num_requests = 0  # in steps with drafts since one was reported
        self._first_followed = 0
        if recording.has_kv:
            for request in self.running:
                request.has_hole = not policy.will_draft(request.progress, len(texts) - 1)
        if recording.prompts_together:
            together = recording.prompts_together
            self.running, self._waiting = self.running[:together], self.running[together:]

    @staticmethod
    def _started(number: int, text: Text) -> Decoding:
        """A request whose prompt is computed, with its first token."""
        prompt = [TOKEN] * text.num_prompt
        params = SamplingParams(max_tokens=NUM_TOKENS)
        limit = text.num_prompt + NUM_TOKENS
        spec = RequestSpec(token_ids=prompt, params=params, row_seed=0, limit=limit)
        return Decoding(text, Progress(id=str(number), spec=spec, arrival=number, tokens=[*prompt, TOKEN]))

    def step(self) -> None:
        """One step: ask the policy, verify what waits (not in the first), make drafts for the next step."""
        asked = [request for request in self.running if not request.has_hole]
        num_others = len(self.running) - len(asked)
        chosen = self._policy.choose([request.progress for request in asked], num_others, len(self._waiting))
        is_probing = self._policy.is_probing  # what this step tells may end it
        compared: Sequence[int] = [0] * len(asked)
        if asked and self._compares:
            compared = self._policy.shadows(chosen, num_others) or compared
        most = max((*chosen, *compared), default=0)
        price = self._policy.price() if self._is_copied else RowPrice()
        is_plain = not most and not any(request.num_drafts for request in self.running)
        is_told, joining = False, list[Decoding]()
        if self._num_steps:
            together = self._recording.prompts_together
            joining, self._waiting = self._waiting[:together], self._waiting[together:]
            is_shadow = bool(most) and not any(chosen)
            is_told = self._verify(most, joining, is_shadow=is_shadow, is_plain=is_plain)
        self._num_steps += 1
        if self._recording.has_kv and is_plain and not is_probing:
            for request in self.running:
                request.has_hole = True
        for request in self.running:
            self._compare(request.progress)
        self.running = [request for request in self.running if request.progress.room >= 0]
        for request, number, shadows in zip(asked, chosen, compared, strict=True):
            if request.progress.room > 0:
                self._draft(request, number, shadows, price if most else RowPrice())
        self.running += joining
        is_due = any(compared) or (not is_plain and self._num_steps % FOLLOWED_EVERY == 1)
        if is_told and self._compares and is_due:
            self._tell_lookups(is_compared=any(compared))

    def _verify(self, most: int, joining: Sequence[Decoding], *, is_shadow: bool, is_plain: bool) -> bool:
        """The target's pass: takes its time, and adds tokens. `joining`: requests whose prompts it computes, too.
        Returns whether it was reported."""
        num_requests = len(self.running)
        num_rows = num_requests + sum(request.num_drafts for request in self.running)
        context = sum(len(request.progress.tokens) for request in self.running)
        seconds = self._costs.step(num_requests, num_rows, most, context)
        if joining:  # a step with prompts takes as long as its rows
            num_prompt_rows = sum(request.text.num_prompt for request in joining)
            seconds = self._costs.target_row_seconds * (num_rows + num_prompt_rows)
            seconds += self._costs.draft.at(num_requests, most)
        seconds *= math.exp(self._generator.gauss(0, NOISE))
        self.seconds += seconds
        num_tokens = sum(self._accept(request) for request in self.running)
        if not is_plain:
            self._num_tokens += num_tokens
            self._num_requests += num_requests
        every = self._policy.plain_every if is_plain else self._policy.report_every
        is_told = self._num_steps % every == 0 and not joining
        if is_told:
            host, each_tokens = self._costs.host.seconds, 0.0
            if not is_plain:
                each_tokens = self._num_tokens / self._num_requests
                self._num_tokens = self._num_requests = 0
            step = StepOutcome(num_requests, num_rows, most, num_tokens, context, seconds, host, is_shadow)
            self._policy.finished(step._replace(each_tokens=each_tokens))
        return is_told

    def _tell_lookups(self, *, is_compared: bool) -> None:
        """As `Drafting._tell_lookups`."""
        for request in self.running:
            progress = request.progress
            if progress.num_asked:
                self._policy.looked_up(progress, progress.num_asked, progress.num_given)
                progress.num_asked = progress.num_given = 0
        for _ in range(0 if is_compared else num_followed(len(self.running))):
            request = self.running[self._first_followed % len(self.running)]
            self._first_followed += 1
            if request.num_asked:
                self._policy.proposed(request.progress, request.num_asked, request.num_drafts, is_model=False)
                request.progress.is_followed = request.num_drafts > 0

    def _accept(self, request: Decoding) -> int:
        """Verify a request's drafts; returns the number of new tokens."""
        progress, num_drafts = request.progress, request.num_drafts
        num_accepted = min(num_drafts, request.found.num_right, progress.room)
        progress.tokens += [TOKEN] * (num_accepted + 1)
        request.num_drafts = 0
        if num_drafts and (progress.is_followed or not self._compares):
            num_observed = num_drafts if progress.room >= 0 else num_accepted
            if self._compares:
                self._policy.verified(progress, num_observed, num_accepted, is_model=False)
            else:
                num_outputs = progress.num_outputs - num_accepted - 1
                self._policy.learn(progress, [Round(num_observed, num_accepted, 0, 0, num_outputs)])
        progress.is_followed = False
        return num_accepted + 1

    def _draft(self, request: Decoding, number: int, shadows: int, price: RowPrice) -> None:
        progress, found = request.progress, request.found
        if price.rows and isinstance(self._policy, Rehearsed):
            found = self._cut(request, found, min(max(number, shadows), progress.room), price)
        num_asked = min(max(number, shadows), progress.room)
        num_drafts = min(found.num_drafts, num_asked)
        request.num_drafts, request.num_asked = min(num_drafts, number), num_asked
        if self._compares and num_asked:
            progress.num_asked += 1
            progress.num_given += num_drafts > 0
        if not num_asked or bool(shadows) != self._compares:
            return
        self._policy.proposed(progress, num_asked, num_drafts, is_model=not self._compares)
        if shadows and num_drafts:
            num_right = min(found.num_right, num_drafts)
            drafts = [TOKEN] * num_right + [OTHER] * (num_drafts - num_right)
            progress.shadows.append(Shadow(len(progress.tokens), drafts, num_asked))

    def _compare(self, progress: Progress) -> None:
        """As `Drafting.compare`."""
        if not progress.shadows or (self._num_steps % COMPARED_EVERY and progress.room >= 0):
            return
        found, progress.shadows = compare_all(progress.shadows, progress.tokens)
        for comparison in found:
            self._policy.compared(progress, comparison)

    def _cut(self, request: Decoding, found: Found, num_asked: int, price: RowPrice) -> Found:
        """The drafts that pay, of those asked for."""
        assert isinstance(self._policy, Rehearsed)
        matches, num_tokens = self._policy.matches, len(request.progress.tokens)
        if request.last is not None:
            last, before = request.last
            num_known = min(num_tokens - before, last.num_drafts)
            num_right = min(last.num_right, num_known)
            branchings = [Branching.UNKNOWN] * min(num_right + 1, num_known)  # a recording does not tell
            matches.count(last.num_matched, branchings, num_right)
        num_drafts = min(found.num_drafts, num_asked)
        found = found._replace(num_drafts=num_drafts, num_right=min(found.num_right, num_drafts))
        request.last = (found, num_tokens) if num_drafts else None
        chances = chances_of(matches)[Branching.UNKNOWN][found.num_matched :]
        return found._replace(num_drafts=num_paying(chances[:num_drafts], price.others, price.rows))


def decoded(policy: Policy, recording: Recording, texts: Sequence[Text], generator: random.Random) -> float:
    """Seconds that the policy needs for these texts."""
    before = policy.num_choices if isinstance(policy, Rehearsed) else 0
    turn = Turn(policy, recording, texts, generator)
    while turn.running:
        turn.step()
    after = policy.num_choices if isinstance(policy, Rehearsed) else 0
    return turn.seconds + (0 if recording.buckets else (after - before) * CHOOSING)


def speeds(recording: Recording, batch: int, seed: int = 0) -> dict[str, float]:
    """Speed of each way of choosing the number of drafts, relative to plain decoding. The first turn does not count:
    `auto` still learns there what it knows in service; `new` is a new engine in each turn."""
    most = recording.levels[-1]

    def new() -> Policy:
        acceptance = acceptance_of(most, has_kv=recording.has_kv)
        policy = Rehearsed(
            recording.step_costs(),
            acceptance,
            is_lookup=recording.is_compared,
            probes=not recording.buckets,
            is_cut=recording.is_copied,
        )
        policy.matches = MatchRecord.empty(0, most)
        return policy

    auto, average = new(), AverageAcceptance(most)
    table = table_up_to(most)
    ways: dict[str, Callable[[], Policy]] = {
        "plain": lambda: FixedPolicy(0),
        **{f"K={k}": lambda k=k: FixedPolicy(k) for k in recording.levels[1:]},  # type: ignore[misc]
        "vLLM's": lambda: table,
        "SGLang's": lambda: average,
        "auto": lambda: auto,
        "new": new,
    }
    seconds = dict.fromkeys(ways, 0.0)
    for turn in range(TURNS.get(batch, 8)):
        numbers = range(turn * batch, (turn + 1) * batch)
        texts = [recording.texts[number % len(recording.texts)] for number in numbers]
        for name, way in ways.items():
            taken = decoded(way(), recording, texts, random.Random(1000 * seed + turn))
            seconds[name] += taken if turn else 0.0
    return {name: seconds["plain"] / taken for name, taken in seconds.items()}


def best_fixed(found: dict[str, float]) -> str:
    """The best fixed number, or plain decoding."""
    return max((name for name in found if name == "plain" or name.startswith("K=")), key=found.__getitem__)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", type=Path, nargs="*")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="write a recording to this file")
    parser.add_argument("--model", help="[default: the one that comes with draftproof]")
    parser.add_argument("--drafter", type=json.loads, help="a speculative_config")
    parser.add_argument("--prompts", type=Path, help="as for generate")
    parser.add_argument("--changing", action="store_true", help="record noise after the prompts")
    given = parser.parse_args()
    if given.record is not None:
        found = record(given.model, given.drafter, given.prompts, changing=given.changing)
        given.record.write_text(json.dumps(found.as_json()))
        given.recordings.append(given.record)
    is_slow = False
    for file in given.recordings:
        for batch in map(int, given.batches.split(",")):
            speed = speeds(Recording.read(file), batch, given.seed)
            best = best_fixed(speed)
            is_slow |= speed["auto"] < PLAIN_BOUND or speed["auto"] < FIXED_BOUND * speed[best]
            shown = "  ".join(f"{name} {ratio:.3f}" for name, ratio in speed.items())
            print(f"{file.stem}, batch {batch}: {shown}; auto {speed['auto'] / speed[best]:.3f} of {best}")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
