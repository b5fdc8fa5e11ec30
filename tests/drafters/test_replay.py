"""The replay drafter: what it finds and proposes, how often it is wrong on purpose, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import LLM, RequestOutput, SamplingParams, assets
from draftproof.bench.compare import compare
from draftproof.cache.pool import PagedKV
from draftproof.drafters.base import DraftSpec, Proposal, Taps, Verified
from draftproof.drafters.recordings import Recording, RecordingIndex, load, save
from draftproof.drafters.replay import ReplayDrafter, ReplayOptions

PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=0)
HEAD = {"model": str(assets.path("tiny-eagle3"))}
PROMPTS: list[Any] = [[11 * i + 3, 7 * i + 40, 300 + i, 5, 9 * i + 1] for i in range(6)]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    return LLM(dtype="float32", max_model_len=128).generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def recordings(plain: list[RequestOutput], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recordings") / "plain.json"
    save(path, plain)
    return str(path)


def replaying(recordings: str, settings: dict[str, Any] | None = None, **options: Any) -> LLM:
    config = {
        "method": "replay", "recordings": recordings, "policy": "fixed", "num_speculative_tokens": 4, **options
    }  # fmt: skip
    return LLM(dtype="float32", max_model_len=128, speculative_config=config, **settings or {})


def decode(llm: LLM, plain: list[RequestOutput]) -> None:
    assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert llm.stats.num_drafter_faults == 0


@pytest.mark.parametrize("drafters", [[], [HEAD], [{"method": "ngram"}, HEAD]], ids=["free", "head", "chain"])
def test_at_acceptance_1_every_draft_is_accepted(plain: Any, recordings: str, drafters: Any) -> None:
    """With positions off by one nearly none would be: the text does not repeat one token."""
    llm = replaying(recordings, drafters=drafters)
    decode(llm, plain)
    s = llm.stats.speculation
    assert s.num_draft_tokens == s.num_accepted_tokens > 0
    # 1 token from the prompt, then 9 rounds of 4 drafts and the bonus token, then the last 2 with a draft for one
    assert s.drafted_per_position == s.accepted_per_position == [60, 54, 54, 54]
    assert s.acceptance_length == pytest.approx((9 * 5 + 2) / 10)
    assert all(len(set(o.outputs[0].token_ids)) > 4 for o in plain)


def test_after_a_preemption_the_recording_is_found_again(plain: Any, recordings: str) -> None:
    llm = replaying(recordings, {"num_kv_blocks": 12, "enable_prefix_caching": False}, drafters=[HEAD])
    decode(llm, plain)
    assert llm.stats.num_preemptions > 0
    s = llm.stats.speculation
    assert s.num_draft_tokens == s.num_accepted_tokens > 150


def test_at_acceptance_0_no_draft_is_accepted(plain: Any, recordings: str) -> None:
    llm = replaying(recordings, acceptance=0)
    decode(llm, plain)
    assert llm.stats.speculation.num_accepted_tokens == 0
    assert llm.stats.speculation.num_draft_tokens > 500


def test_acceptance_may_differ_by_position(plain: Any, recordings: str) -> None:
    llm = replaying(recordings, acceptance=[1, 1, 0])
    decode(llm, plain)
    accepted = llm.stats.speculation.accepted_per_position
    assert accepted[0] > 0 and accepted[2:] in ([], [0, 0])
    assert llm.stats.speculation.drafted_per_position[1] == accepted[1]


def test_the_same_tokens_are_wrong_in_any_batch_and_others_with_another_seed(
    plain: Any, recordings: str
) -> None:
    rounds = []
    for seed, batch in ((0, 6), (0, 1), (1, 6)):
        llm = replaying(recordings, {"max_num_seqs": batch}, acceptance=0.5, seed=seed)
        decode(llm, plain)
        rounds.append(llm.stats.speculation.accepted_per_position)
    assert rounds[0] == rounds[1] != rounds[2]


@dataclass
class Spy:
    """An inner drafter that records its calls; its proposals must never be used."""

    spec: DraftSpec = field(
        default_factory=lambda: DraftSpec(taps=Taps(layers=(1,)), kv=(PagedKV(heads=1, head_dim=8),))
    )
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def bind(self, memory: Any) -> None:
        self.calls.append(("bind", memory))

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        self.calls.append(("admit", slot, list(tokens), num_cached))

    def release(self, slot: int) -> None:
        self.calls.append(("release", slot))

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self.calls.append(("propose", num_drafts))
        return Proposal(torch.full((len(verified.k_R), num_drafts), 99), verified.k_R)


def drafter(
    recordings: list[Recording], inner: Any = None, acceptance: float = 1.0, slots: int = 4
) -> ReplayDrafter:
    return ReplayDrafter(
        recordings, ReplayOptions(recordings="unread", acceptance=acceptance), inner,
        num_slots=slots, num_drafts=3, vocab_size=100, device=torch.device("cpu"),
    )  # fmt: skip


def verified(positions: list[list[int]], slots: list[int], live: list[int], k: list[int]) -> Verified:
    """Rows at these positions, per request."""
    counts = torch.tensor([0, *map(len, positions)])
    flat = torch.tensor([p for row in positions for p in row])
    return Verified(
        tokens_T=torch.zeros_like(flat),
        positions_T=flat,
        query_start_loc_R1=counts.cumsum(0),
        slots_R=torch.tensor(slots),
        live_R=torch.tensor(live),
        next_R=torch.zeros(len(slots), dtype=torch.int64),
        k_R=torch.tensor(k),
        taps=(),
        draw=None,  # type: ignore[arg-type]
        history=lambda _: torch.zeros(0),
    )


def proposed(d: ReplayDrafter, given: Verified, num: int = 3) -> list[list[int]]:
    p = d.propose(given, num)
    assert p.tokens_RK.shape == (len(given.k_R), num)
    return [row[:n] for row, n in zip(p.tokens_RK.tolist(), p.count_R.tolist(), strict=True)]


BOOK = [Recording((1, 2, 3), (10, 11, 12, 13, 14, 15)), Recording((4,), (20, 21, 22))]


def test_drafts_follow_the_token_after_the_last_live_row() -> None:
    d = drafter(BOOK)
    for slot, tokens in ((0, [1, 2, 3]), (1, [4]), (2, [7, 7]), (3, [1, 2, 3, 10])):
        d.admit(slot, tokens, 0)
    # whole prompt -> 10, then drafts 11..; two of three rows live: 21 is next, one token left; unknown prompt;
    # a round of positions 4 and 5, one live: 12 is next
    given = verified([[0, 1, 2], [0, 1, 2], [0, 1], [4, 5]], [0, 1, 2, 3], [3, 2, 2, 1], [3, 3, 3, 2])
    assert proposed(d, given) == [[11, 12, 13], [22], [], [13, 14]]
    assert proposed(d, verified([[0]], [1], [1], [3])) == [[21, 22]]
    assert proposed(d, verified([[2, 3]], [1], [2], [3])) == [[]]  # past the end


class Watch(TorchDispatchMode):
    """Records operators that make the host read from the device, write to it, or wait for a size."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        moves = name == "_to_copy" and (kwargs or {}).get("device") is not None
        if moves or name in ("_local_scalar_dense", "lift_fresh", "nonzero", "copy_", "is_nonzero"):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def test_proposing_needs_nothing_from_the_host() -> None:
    """Hence proposing can be part of a CUDA graph."""
    d = drafter(BOOK)
    d.admit(0, [1, 2, 3], 0)
    given = verified([[0, 1, 2]], [0], [3], [3])
    with Watch() as watch:
        d.propose(given, 3)
    assert not watch.found
    with Watch() as watch:
        d.admit(1, [4], 0)
    assert watch.found  # the watch works


def test_a_request_without_live_rows_or_wishes_gets_nothing_and_a_released_slot_forgets() -> None:
    d = drafter(BOOK)
    d.admit(0, [1, 2, 3], 0)
    d.admit(1, [4], 0)
    assert proposed(d, verified([[0, 1, 2], [0]], [0, 1], [0, 1], [3, 0])) == [[], []]
    assert proposed(d, verified([[0, 1]], [0], [2], [0]), num=0) == [[]]
    d.release(0)
    assert proposed(d, verified([[0, 1, 2]], [0], [3], [3])) == [[]]


def test_a_wrong_token_is_the_next_id_at_the_chosen_rate() -> None:
    recording = Recording((1,), tuple(i % 100 for i in range(4000)))
    d = drafter([recording, Recording((2,), recording.output)], acceptance=0.7)
    noise_GL = d._noise_GL
    right = {True: 0, False: 0}
    d.admit(0, [1], 0)
    for start in range(0, 3900, 3):
        (drafts,) = proposed(d, verified([[start]], [0], [1], [3]))
        for i, token in enumerate(drafts):
            true = recording.output[start + 1 + i]
            assert token in (true, (true + 1) % 100)
            right[token == true] += 1
    share = right[True] / (right[True] + right[False])
    assert right[True] + right[False] == 3900
    assert share == pytest.approx(0.7, abs=0.03)  # four standard errors
    assert not torch.equal(noise_GL[0], noise_GL[1])  # the errors of a batch's requests are independent


def test_half_right_gives_the_expected_tokens_a_round() -> None:
    """K = 3 at 0.5: 1 + 1/2 + 1/4 + 1/8 tokens per round."""
    recording = Recording((1,), tuple(i % 100 for i in range(6000)))
    d = drafter([recording], acceptance=0.5)
    d.admit(0, [1], 0)
    position, rounds = 0, 0
    while position < 5990:
        (drafts,) = proposed(d, verified([[position]], [0], [1], [3]))
        true = recording.output[position + 1 : position + 4]
        agree = [a == b for a, b in zip(drafts, true, strict=True)]
        position += 1 + (agree.index(False) if False in agree else 3)
        rounds += 1
    assert position / rounds == pytest.approx(1.875, abs=0.08)


def test_the_inner_drafter_runs_is_told_everything_and_is_not_heard() -> None:
    spy = Spy()
    spy.spec = replace(spy.spec, estimates=True)
    d = drafter(BOOK, spy)
    assert d.spec == replace(spy.spec, estimates=False), "its own proposals do not end where the spy's would"
    d.bind("memory")  # type: ignore[arg-type]
    d.admit(0, [4], 1)
    assert proposed(d, verified([[0]], [0], [1], [2]), num=2) == [[21, 22]]
    d.release(0)
    assert spy.calls == [("bind", "memory"), ("admit", 0, [4], 1), ("propose", 2), ("release", 0)]


def test_a_recording_is_found_by_prompt_then_by_what_followed() -> None:
    library = RecordingIndex([*BOOK, Recording((4,), (20, 9, 9)), Recording((4, 20), (9, 8))])
    assert library.find([4]) == 1
    assert library.find([4, 20, 9, 9]) == 2
    assert library.find([4, 20]) == 3  # the longest prompt counts
    assert library.find([4, 20, 9, 8]) == 3
    assert library.find([1, 2, 3, 10, 11, 12, 13, 14, 15, 16]) is None  # longer than what was recorded
    assert library.find([1, 2]) is None and library.find([]) is None


def test_what_cannot_be_used_is_refused(tmp_path: Path, recordings: str) -> None:
    for options, message in (
        ({}, "recordings='': must be a file of"),
        ({"recordings": str(tmp_path / "absent.json")}, "absent.json.*cannot be read"),
        ({"recordings": 3}, "recordings=3: must be a file"),
        ({"recordings": recordings, "acceptance": 1.5}, r"acceptance=1.5: must be a number from 0 to 1"),
        ({"recordings": recordings, "acceptance": []}, r"acceptance=\[\]"),
        ({"recordings": recordings, "acceptance": "high"}, r"acceptance='high'"),
        ({"recordings": recordings, "seed": 0.5}, "seed=0.5: must be an integer"),
        ({"recordings": recordings, "acceptence": 1}, "did you mean 'acceptance'"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(dtype="float32", speculative_config={"method": "replay", **options})
    path = tmp_path / "recordings.json"
    for content, message in (
        ([], "must hold a list"),
        ([{"prompt_token_ids": [1]}], "token_ids must be a list of ids below"),
        ([{"prompt_token_ids": [1], "token_ids": [50]}], "vocab_size=50; record again"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            load(path, 50)


def test_drafters_go_with_methods_that_run_them() -> None:
    with pytest.raises(ValueError, match=r"drafters=... goes with"):
        LLM(speculative_config={"method": "ngram", "drafters": [HEAD]})
