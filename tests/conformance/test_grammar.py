"""Answers that follow a grammar are valid, and with every drafter the same as without one.

    DRAFTPROOF_TEST_EVERYTHING=1 NUM_SCHEMAS=500 SCHEMA_SUITE=DIR python -m pytest tests/conformance/test_grammar.py -rP

runs 500 schemas with every drafter and prints a summary; the default is sixty, with one drafter of each kind. A third
comes from types of client libraries, a third from JSON-Schema-Test-Suite (DIR: its folder of one draft), and the rest
is generated. Each schema is answered greedily and sampled; SCHEMA_MODES=turns alternates, in half the time.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from draftproof import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from draftproof.grammar.matcher import Matcher
from tests.conformance.cases import CASES, KINDS, Case
from tests.conformance.schemas import generated, shipped, suite
from tests.made.shared import EAGLE3
from tests.slow import few, some

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
NUM_SCHEMAS = int(os.environ.get("NUM_SCHEMAS", "60"))
SCHEMA_SUITE = os.environ.get("SCHEMA_SUITE", "")
IS_BY_TURNS = os.environ.get("SCHEMA_MODES") == "turns"
QUICK = ("eagle3", "suffix", "ff")
# Least share of answers that must end by themselves, by the source of their schemas. Clients' types and the suite's
# schemas have unbounded texts and objects, which a small model may never end; generated ones bound everything.
LEAST_FINISHED = {"types": 0.5, "suite": 0.15, "generated": 1.0}
FEW_BLOCKS: dict[str, Any] = {"num_kv_blocks": 36, "max_num_seqs": 16}  # so that requests are preempted
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "seed": 3}
PLAIN = Case({})


def ask(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """Everything in an output that a drafter could change, logprobs with all their bits."""
    return [
        (c.token_ids, c.text, c.finish_reason, c.cumulative_logprob, o.error)
        for o in outputs
        for c in o.outputs
    ]


@functools.cache
def usable() -> list[tuple[str, dict[str, Any]]]:
    """(source, schema) pairs that llguidance supports: at most a third each from libraries' types and from the test
    suite, the rest generated."""
    found = list[tuple[str, dict[str, Any]]]()
    with LLM(**ENGINE) as llm:
        for source, listed in (("types", shipped()), ("suite", suite(SCHEMA_SUITE))):
            taken = ((source, schema) for schema in listed if is_taken(llm, schema))
            found += itertools.islice(taken, NUM_SCHEMAS // 3)
    return found + [("generated", schema) for schema in generated(NUM_SCHEMAS - len(found), seed=23)]


def is_taken(llm: LLM, schema: dict[str, Any]) -> bool:
    try:
        llm.requests.inputs.grammar(SamplingParams(structured_outputs={"json": schema}))  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def wanted() -> tuple[list[str], list[SamplingParams], list[str]]:
    """Requests for each schema, greedy and sampled, with one further option in turn: (prompts, parameters, sources)."""
    more: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.2},
        {"min_tokens": 9},
    ]
    prompts, params, sources = list[str](), list[SamplingParams](), list[str]()
    for number, (source, schema) in enumerate(usable()):
        most = 200 if source == "generated" else 120 if NUM_SCHEMAS < 100 else 64
        rule = StructuredOutputsParams(json=schema, disable_any_whitespace=number % 5 == 4)
        shared: dict[str, Any] = {
            "max_tokens": most,
            "structured_outputs": rule,
            **more[number // 2 % len(more)],
        }
        if number % 5 < 2:  # not more often: it takes longer than everything else
            shared["logprobs"] = 1
        for mode, own in enumerate(({"temperature": 0}, {"temperature": 0.9, "seed": number})):
            if IS_BY_TURNS and mode != number % 2:
                continue
            params.append(SamplingParams(**own, **shared))
            prompts.append((f"answer {number} = ", f"# {number % 7}\nx = ")[mode])
            sources.append(source)
    return prompts, params, sources


@functools.cache
def plain(target: str | None) -> list[Any]:
    prompts, params, _ = wanted()
    with LLM(model=target, **ENGINE) as llm:
        return answers(ask(llm, prompts, params))


def test_every_finished_answer_is_valid() -> None:
    _, params, sources = wanted()
    num_asked, num_finished = Counter(sources), Counter[str]()
    for given, source, (_, text, reason, _, error) in zip(params, sources, plain(None), strict=True):
        assert error is None
        assert given.structured_outputs is not None
        if reason != "stop":
            continue
        num_finished[source] += 1
        schema = json.loads(str(given.structured_outputs.json))
        validator = jsonschema.Draft202012Validator(schema)
        problems = list(validator.iter_errors(json.loads(text)))
        assert not problems, (schema, text, problems)
    for source, number in num_asked.items():
        print(f"{source}: {num_finished[source]} of {number} answers ended, and all of them are valid")
        assert num_finished[source] >= LEAST_FINISHED[source] * number


@pytest.mark.parametrize("name", few(some(CASES, KINDS), *QUICK))
def test_drafts_change_no_answer(name: str) -> None:
    case = CASES[name]
    prompts, params, _ = wanted()
    with LLM(**{**ENGINE, **FEW_BLOCKS, **case.llm(4)}) as llm:
        found = answers(ask(llm, prompts, params))
        assert found == plain(case.target)
        assert llm.stats.num_preemptions > 0
        assert llm.stats.num_drafter_faults == 0 or name == "custom"
        speculation = llm.stats.speculation
        print(
            f"{name}: {len(found)} answers, {sum(len(a[0]) for a in found)} tokens, as without drafts; "
            f"{speculation.num_accepted_tokens} of {speculation.num_draft_tokens} drafts accepted, "
            f"{llm.stats.num_preemptions} preemptions"
        )
        assert speculation.num_draft_tokens > 0 or name == "replay"  # its recordings are of other answers
        if name == "ff":
            forced = llm.stats.drafters[-1]
            assert forced.name == "ff"
            assert forced.speculation.num_accepted_tokens == forced.speculation.num_draft_tokens > 100


def test_forced_text_alone_changes_no_answer() -> None:
    prompts, params, _ = wanted()
    with LLM(**{**ENGINE, **FEW_BLOCKS}, speculative_config={"method": "ff"}) as llm:
        assert answers(ask(llm, prompts, params)) == plain(None)
        assert llm.stats.num_preemptions > 0
        speculation = llm.stats.speculation
        assert speculation.num_accepted_tokens == speculation.num_draft_tokens > 100


RULES: dict[str, dict[str, Any]] = {
    "regex": {"regex": "(ab|cd){2,5}[0-9]{3}"},
    "choice": {"choice": ["positive", "negative", "neither, nor"]},
    "grammar": {"grammar": 'start: "[" item ("," item)* "]"\nitem: /[0-9]{1,3}/'},
    "json_object": {"json_object": True},
    "tags": {
        "structural_tag": {
            "structures": [{"begin": "<f>", "schema": {"type": "object", "maxProperties": 1}, "end": "</f>"}],
            "triggers": ["<f"],
        }
    },
}


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_every_rule_beside_requests_without_one(policy: str) -> None:
    """With several choices, prompts that share a prefix, grammars that begin after a token, and mixed batches."""
    prompts, params = list[str](), list[SamplingParams]()
    after = 203  # a newline, standing for the end of a reasoning block
    for number, rule in enumerate(RULES.values()):
        for more in ({}, {"after_token_id": after}):
            given = StructuredOutputsParams(**rule, **more)
            params.append(SamplingParams(temperature=0, max_tokens=40, structured_outputs=given))
            params.append(
                SamplingParams(
                    temperature=1.1, n=2, seed=number, max_tokens=40, structured_outputs=given, logprobs=2
                )
            )
            params.append(SamplingParams(temperature=0.8, seed=number, max_tokens=30))
            prompts += ["def f(x):\n    return", "import os\n", "def f(x):\n    pass"]
    with LLM(**ENGINE) as llm:
        expected = answers(ask(llm, prompts, params))
    assert {reason for *_, reason, _, _ in expected} <= {"stop", "length"}
    config = {"method": "chain", "drafters": [{"method": "ff"}, {"model": EAGLE3}, {"method": "ngram"}]}
    with LLM(**ENGINE, speculative_config={**config, "policy": policy}) as llm:
        assert answers(ask(llm, prompts, params)) == expected
        assert answers(ask(llm, prompts, params)) == expected, "from the prefix cache"
        assert llm.stats.drafters[-1].speculation.num_accepted_tokens > 10


def test_log_probabilities_are_those_before_the_mask() -> None:
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    rule = StructuredOutputsParams(choice=["zebra"])
    bound = SamplingParams(temperature=0, max_tokens=8, logprobs=3, structured_outputs=rule)
    with LLM(**ENGINE) as llm:
        expected, found = (o.outputs[0].logprobs for o in ask(llm, ["import "] * 2, [free, bound]))
    assert expected is not None and found is not None
    likely = set(expected[0])
    assert likely <= set(found[0]) and all(found[0][i].logprob == expected[0][i].logprob for i in likely)
    assert max(entry.rank for entry in found[0].values()) > 100, "what the rule left is no likely token"


@pytest.mark.parametrize("params", [{"min_tokens": 30}, {"ignore_eos": True}, {"logit_bias": {2: -100.0}}])
def test_a_complete_answer_ends(params: dict[str, Any]) -> None:
    rule = StructuredOutputsParams(choice=["yes", "no"])
    with LLM(**ENGINE, speculative_config={"model": EAGLE3}) as llm:
        given = SamplingParams(temperature=0, max_tokens=60, structured_outputs=rule, **params)
        output = ask(llm, ["Is it?"], [given])[0].outputs[0]
    assert output.text in ("yes", "no") and output.finish_reason == "stop"


def test_what_leaves_no_token_is_named() -> None:
    rule = StructuredOutputsParams(choice=["yes", "no"])
    with LLM(**ENGINE) as llm:
        given = SamplingParams(allowed_token_ids=[500, 501], structured_outputs=rule, max_tokens=9)
        output = ask(llm, ["Is it?"], [given])[0]
    assert output.outputs[0].finish_reason == "error"
    assert "structured_outputs, allowed_token_ids rule out all of them" in str(output.error)


def test_a_grammar_that_cannot_be_is_refused_and_others_go_on() -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    good = SamplingParams(temperature=0, max_tokens=4)
    with LLM(**ENGINE) as llm:
        outputs = ask(llm, ["a", "b"], [bad, good])
        assert "regex: cannot be followed" in str(outputs[0].error) and outputs[1].error is None
        with pytest.raises(ValueError, match="after_token_id=9000"):
            rule = StructuredOutputsParams(regex="a", after_token_id=9000)
            ask(llm, ["a"], [SamplingParams(structured_outputs=rule)])


def moved_by_drafts(self: Matcher, drafts: Sequence[int], num_rows: int) -> bytes:
    """Wrong: the matcher advances by the drafts and stays there."""
    masks = right_masks(self, drafts, num_rows)
    self._matcher.try_consume_tokens(list(drafts))
    return masks


def same_for_all_rows(self: Matcher, drafts: Sequence[int], num_rows: int) -> bytes:
    """Wrong: rows after drafts get the mask of the first row."""
    return right_masks(self, [], 1) * num_rows


right_masks = Matcher.masks


@pytest.mark.parametrize("wrong", [None, moved_by_drafts, same_for_all_rows])
def test_wrong_masks_are_seen(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    prompts, params = (every[:24] for every in wanted()[:2])
    with LLM(**ENGINE) as llm:
        expected = answers(ask(llm, prompts, params))
    if wrong is not None:
        monkeypatch.setattr(Matcher, "masks", wrong)
    with LLM(**ENGINE, speculative_config={"model": EAGLE3, "num_speculative_tokens": 4}) as llm:
        assert (answers(ask(llm, prompts, params)) == expected) == (wrong is None)
