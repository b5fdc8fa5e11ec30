"""The device half alone, driven by a recorded list of steps."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from draftproof import LLM, SamplingParams, assets
from draftproof.bench.compare import compare
from draftproof.bench.internals import Stepper, drafter_of
from draftproof.engine import profile, step_vector
from draftproof.engine.costs import ROW_SIZES
from draftproof.engine.interface import Admission, RowPrice, RowResult, ScheduledRequest, StepInput
from draftproof.engine.policy import FixedPolicy
from draftproof.engine.runner import ModelRunner
from draftproof.engine.shapes import BatchShape
from draftproof.runtime import native
from draftproof.runtime.native import Program

EAGLE3: dict[str, Any] = {"model": str(assets.path("tiny-eagle3")), "policy": "fixed"}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, prompt_logprobs=1, bad_words=["return"]),
    SamplingParams(
        temperature=0.7, top_p=0.9, max_tokens=9, logit_bias={5: 1.5, 9: -3}, repetition_penalty=1.1
    ),
]
PROMPTS = ["def add(a, b):", "import os\n", "class A"]


def engine() -> LLM:
    return LLM(dtype="float32", max_model_len=128, max_num_batched_tokens=16, speculative_config=EAGLE3)


def test_a_recorded_list_of_steps_gives_the_same_results_on_a_fresh_runner() -> None:
    vectors: list[list[int]] = []
    expected: list[list[RowResult]] = []
    with engine() as llm:
        run = llm.engine.runner.run

        def recorded(step: StepInput) -> Any:
            vectors.append(step_vector.pack(step))
            launched = run(step)
            expected.append(launched.wait())
            return launched

        llm.engine.runner.run = recorded  # type: ignore[method-assign]
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.stats.speculation.num_accepted_tokens > 0
    with engine() as llm:
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        found = [runner.run(step_vector.unpack(vector)).wait() for vector in vectors]
    assert found == expected and len(found) > 5
    assert sum(len(row.token_ids) for rows in found for row in rows) >= 33
    assert any(row.logprobs for rows in found for row in rows)
    assert any(row.prompt_logprobs for rows in found for row in rows)


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_decode_step_with_a_drafter_of_ours_is_two_programs(num_drafts: int) -> None:
    config = {**EAGLE3, "num_speculative_tokens": num_drafts}
    with LLM(dtype="float32", speculative_config=config) as llm:
        llm.generate(
            PROMPTS[0], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False
        )
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        shape = BatchShape.decoding(1, 1 + num_drafts, num_drafts)
        number = runner.graphs.holds(("verify", 1, 1 + num_drafts, 1 + num_drafts, 0))
        assert number and runner.graphs.holds(("drafting", shape, number, True))


ASKING = {
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {396: -30.0, 7: 1.0}},
    "bad words": {"bad_words": ["return", " the"]},
    "allowed ids": {"allowed_token_ids": [i for i in range(5, 4000) if i != 396]},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": [5, 270, 396]},
}


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
@pytest.mark.parametrize("config", [None, EAGLE3], ids=["plain", "eagle3"])
@pytest.mark.parametrize("asked", ASKING)
def test_a_request_with_processing_of_logits_leaves_its_batch_in_recorded_programs(
    config: dict[str, Any] | None, asked: str
) -> None:
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 2
    params.append(SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **ASKING[asked]))
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    with (
        LLM(dtype="float32", speculative_config=config) as llm,
        LLM(dtype="float32", enforce_eager=True) as eager,
    ):
        runner, expected = llm.engine.runner, eager.generate(prompts, params, use_tqdm=False)
        assert isinstance(runner, ModelRunner)
        kind = "step" if config is None else "verify"

        def recorded() -> list[Any]:
            return [key for key in runner.graphs.recorded_keys() if key[0] == kind]  # type: ignore[attr-defined]

        found = llm.generate(prompts, params, use_tqdm=False)
        assert any((key[1].processing if config is None else key[-1]) for key in recorded())
    assert not compare(expected, found)
    assert found[0].outputs[0].token_ids != found[2].outputs[0].token_ids, "it makes a difference"


@pytest.mark.parametrize("config", [None, EAGLE3], ids=["plain", "eagle3"])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_rehearsal_fits_few_slots_and_leaves_nothing_behind(
    config: dict[str, Any] | None, num_slots: int
) -> None:
    """Many short prompts would fill the largest pass, but no more are rehearsed than there are slots."""
    settings = {"max_model_len": 32, "max_num_batched_tokens": 512, "max_num_seqs": num_slots}
    with LLM(dtype="float32", speculative_config=config, **settings) as llm:
        before = llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        seen: list[BatchShape] = []
        step_tensors = runner.step_tensors

        def watched(shape: BatchShape, *rest: Any) -> Any:
            seen.append(shape)
            return step_tensors(shape, *rest)

        runner.step_tensors = watched  # type: ignore[method-assign]
        runner.rehearse()
        assert [(s.num_requests, s.num_rows) for s in seen] == [(num_slots, 32 * num_slots)]
        after = llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
        assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


def test_a_step_is_what_its_vector_says() -> None:
    params = SamplingParams(
        temperature=0.3,
        top_k=5,
        top_p=0.25,
        min_p=1e-3,
        allowed_token_ids=[4, 9],
        logit_bias={4: 0.1},
        max_tokens=None,
    )
    admission = Admission(
        slot=2, token_ids=[1, 2, 3], num_computed=1, num_prompt=2, limit=9, row_seed=-(2**63), params=params,
        stop_ids=frozenset({7, 4}), bad_words_ids=[[3], [5, 6]], is_masked=True,
    )  # fmt: skip
    step = StepInput(
        released=[1],
        admitted=[admission],
        table_entries=[(0, 2, 0, 11), (1, 2, 1, 12)],
        fresh_blocks=[11, 12],
        scheduled=[ScheduledRequest(2, 1, 2, 1, 3, 0, (0, 1), 2), ScheduledRequest(0, 7, 4, 4)],
        all_decode=False,
        without_models=True,
        most_model_drafts=5,
        price=RowPrice(0.25, 3.5, 0.5, 0.125),
        masks=[b"\x01\x00\x00\xff" * 2, b""],
        forced=[(2, 5, [7, 8])],
    )
    assert step_vector.unpack(step_vector.pack(step)) == step
    assert step_vector.pack(StepInput(released=[3])) == [1, 3, *[0] * 7, -1, *[0] * 6]


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
@pytest.mark.parametrize("speculative, num_programs", [(None, 1), (EAGLE3, 2)])
def test_a_decoding_step_that_comes_again_is_run_without_python(
    monkeypatch: pytest.MonkeyPatch, speculative: dict[str, Any] | None, num_programs: int
) -> None:
    """One recorded program computes, samples and commits; a second one drafts."""
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
    with LLM(max_model_len=128, speculative_config=speculative) as llm:
        (expected,) = llm.generate(PROMPTS[0], params, use_tqdm=False)  # records the recurring steps
        run, calls = Program.__call__, list[Program]()
        monkeypatch.setattr(Program, "__call__", lambda program: (calls.append(program), run(program)))
        num_before = llm.stats.num_steps
        (found,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        num_decoding = llm.stats.num_steps - num_before - 1
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(calls) >= num_programs * (num_decoding - 2), (len(calls), num_decoding)
    assert len(calls) <= num_programs * (num_decoding + 1)  # + 1: the prompt's step


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
@pytest.mark.parametrize(("most_rows", "num_programs"), [(16, 3), (80, 1)])
def test_a_step_with_prompts_drafts_by_a_program(
    monkeypatch: pytest.MonkeyPatch, most_rows: int, num_programs: int
) -> None:
    """A chunked prompt beside a request that decodes: two eager steps and one that is recorded; from then on the draft
    part is replayed, and with few rows also the target's layers and the drafter's rows."""
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    prompt = list(range(10, 10 + 8 * most_rows))
    settings = {"max_model_len": 1024, "max_num_batched_tokens": most_rows, "speculative_config": EAGLE3}
    with LLM(**settings) as llm:
        stepper, counts = Stepper(llm), list[int]()
        first = stepper.add([9, 10, 11], params)
        while not stepper.output(first).outputs[0].token_ids:
            stepper.step()
        stepper.add(prompt, SamplingParams(temperature=0, max_tokens=1))
        run, calls = Program.__call__, list[Program]()
        monkeypatch.setattr(Program, "__call__", lambda program: (calls.append(program), run(program)))
        while not any(delta.request_id != first for delta in stepper.step()):
            counts.append(len(calls))
            calls.clear()
        key = (("draft", drafter_of(llm)), 2, llm.num_speculative_tokens)
        assert llm.engine.runner.graphs.holds(key)
    assert counts == [0, 0, 0] + [num_programs] * (len(counts) - 3) and len(counts) > 6


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
@pytest.mark.parametrize("speculative", [None, EAGLE3])
def test_a_step_is_warming_until_its_parts_are_recorded(speculative: dict[str, Any] | None) -> None:
    """Each kind of step (the prompt's, the first decoding one, the later ones) has two eager runs, then is recorded."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    flags: list[bool] = []
    with LLM(max_model_len=128, speculative_config=speculative) as llm:
        run = llm.engine.runner.run

        def watched(step: StepInput) -> Any:
            launched = run(step)
            flags.append(launched.is_warming)
            return launched

        llm.engine.runner.run = watched  # type: ignore[method-assign]
        llm.generate([PROMPTS[0]], params, use_tqdm=False)
        del flags[-3:]  # the last steps, which have room for fewer drafts
        llm.generate([PROMPTS[0]], params, use_tqdm=False)
    assert all(flags[:3]) and not any(flags[6:11]) and sum(flags) < len(flags) / 2


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
def test_proposals_of_many_lengths_make_few_programs() -> None:
    """Five requests with up to 16 drafts each: numbers of rows are padded, and numbers of requests to 1, 2, 4 and 5."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(23)]
    params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, seed=i) for i in range(23)]
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 16}
    plain, drafting = (
        LLM(max_model_len=160, max_num_seqs=5, speculative_config=config) for config in (None, ngram)
    )
    texts = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (plain, drafting)
    ]
    assert texts[0] == texts[1]
    keys = drafting.engine.runner.graphs.recorded_keys()  # type: ignore[attr-defined]
    sizes = {key[1:3] for key in keys if key[0] == "verify"}
    rows = {num_rows for num_requests, num_rows in sizes if num_requests >= 4}
    assert len(rows) > 5 and rows <= {*ROW_SIZES, 3 * 17, 4 * 17, 5 * 17}
    assert {num_requests for num_requests, _ in sizes} <= {1, 2, 4, 5}
    plain_keys = plain.engine.runner.graphs.recorded_keys()  # type: ignore[attr-defined]
    own = {key[1].num_requests for key in plain_keys if key[0] == "step"}
    assert own == {5, 3}, "without a drafter nothing is filled up"


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
def test_suffix_drafting_is_recorded() -> None:
    """With a fixed number of drafts: in three texts of 60 tokens a slow machine may not find out that they pay."""
    suffix = {"method": "suffix", "num_speculative_tokens": 8}
    llm = LLM(max_model_len=160, max_num_seqs=1, speculative_config=suffix)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
    keys = llm.engine.runner.graphs.recorded_keys()  # type: ignore[attr-defined]
    assert any(key[0] == "drafting" and key[1].num_drafts for key in keys), keys
    assert llm.stats.speculation.num_accepted_tokens


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
def test_nobody_s_first_tokens_wait_for_the_target_s_pass_to_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For any numbers of requests and drafts, the target's Python code is not run in decode-only steps."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=10 + 7 * i, ignore_eos=True) for i in range(6)]
    ngram = {"method": "ngram", "prompt_lookup_min": 1}
    monkeypatch.setattr(profile, "SECONDS", 1e9)
    monkeypatch.setattr(profile, "measure", lambda runner, costs: None)
    monkeypatch.setattr(profile.Store, "read", lambda store: {})
    monkeypatch.setattr(profile.Store, "add", lambda store, found: None)
    with LLM(max_model_len=160, max_num_seqs=3, speculative_config=ngram) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        known = {key[1] for key in runner.graphs.recorded_keys() if key[0] == "target"}  # type: ignore[attr-defined]
        assert known >= {n for n in ROW_SIZES if n <= 3 * 17}
        llm.engine.policy = FixedPolicy(runner.num_drafts)
        target_pass, seen = runner.target_pass, list[int]()

        def watched(most_rows: int, *rest: Any) -> tuple[Tensor, ...]:
            if most_rows == 1 + runner.num_drafts:
                seen.append(len(rest[-1]))
            return target_pass(most_rows, *rest)

        runner.target_pass = watched  # type: ignore[method-assign,assignment]
        llm.generate(prompts, params, use_tqdm=False)
        sizes = {key[1:3] for key in runner.graphs.recorded_keys() if key[0] == "verify"}  # type: ignore[attr-defined]
    assert {num_requests for num_requests, _ in sizes} == {1, 2, 3} and len(sizes) > 20
    assert set(seen) <= {3 * 17}, "with all drafts of all: a size of its own"


@pytest.mark.parametrize(("speculative", "expected"), [({"method": "ngram"}, 16), (EAGLE3, 2)])
def test_what_costs_the_same_for_any_number_of_drafts_has_one_program(
    speculative: dict[str, Any], expected: int
) -> None:
    with LLM(max_model_len=64, native=False, speculative_config=speculative) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        shape = runner.shapes.widened(BatchShape.decoding(3, 2, 2), is_recorded=False)
        assert shape.num_drafts == expected and shape.most_rows == 1 + runner.num_drafts
        alone = BatchShape.decoding(3, 1, 0, with_drafter=False)
        assert runner.shapes.widened(alone, is_recorded=False) == alone


def test_a_request_that_asks_for_processing_takes_no_program() -> None:
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(max_model_len=128) as llm:

        def ids(params: SamplingParams) -> list[int]:
            return list(llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids)

        first = ids(plain)
        asking = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={first[3]: -100})
        found = ids(asking)
        assert found[:3] == first[:3] and first[3] not in found
        assert ids(plain) == first and ids(asking) == found
