"""Classes written for vLLM's custom proposer: how they are recognised, what they are given, how faults are handled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftproof import LLM, DraftSpec, RequestOutput, SamplingParams
from draftproof.bench.compare import compare
from draftproof.drafters import vllm_proposer
from tests.conformance.cases import REPEATS, prompts
from tests.conformance.custom import Moody
from tests.conformance.vllm_style import NgramProposer

HERE = "tests.drafters.test_vllm_proposer"
NGRAM = "tests.conformance.vllm_style.NgramProposer"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def engine(config: dict[str, Any], **settings: Any) -> LLM:
    config = {"num_speculative_tokens": 4, "policy": "fixed", **config}
    return LLM(dtype="float32", max_model_len=256, speculative_config=config, **settings)


def run(llm: LLM) -> list[RequestOutput]:
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    return llm.generate(
        [REPEATS, *prompts()[:2], REPEATS], [GREEDY, GREEDY, sampled, sampled], use_tqdm=False
    )


class Recording(NgramProposer):
    """Records its arguments, and proposes more tokens than wanted."""

    made: list[Recording] = []  # noqa: RUF012

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.config, self.calls, self.loaded_with = vllm_config, list[Any](), list[Any]()
        self.made.append(self)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.loaded_with += args

    def propose(
        self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> Any:
        self.calls.append((sampled_token_ids, num_tokens_no_spec.copy(), token_ids_cpu.copy()))
        drafts = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings)
        return [[*ids, *[7] * 9] for ids in drafts]


@pytest.mark.parametrize(
    "config",
    [
        {"method": "custom_class", "model": NGRAM},
        {"model": NGRAM},
        {"method": NGRAM},
        {"method": "chain", "drafters": [{"model": NGRAM, "num_speculative_tokens": 4}]},
        {"method": "chain", "drafters": [{"method": "suffix"}, {"method": "custom_class", "model": NGRAM}]},
    ],
)
def test_every_way_to_name_it_gives_accepted_drafts_and_equal_outputs(config: dict[str, Any]) -> None:
    llm = engine(config)
    assert not compare(run(LLM(dtype="float32", max_model_len=256)), run(llm))
    assert llm.stats.speculation.num_accepted_tokens > 10 and llm.stats.num_drafter_faults == 0


def test_in_a_chain_it_drafts_where_the_first_has_nothing() -> None:
    never = {"method": "ngram", "prompt_lookup_min": 60, "prompt_lookup_max": 64}
    llm = engine({"method": "chain", "drafters": [never, {"model": NGRAM, "num_speculative_tokens": 4}]})
    alone = engine({"model": NGRAM})
    assert not compare(run(alone), run(llm))
    assert llm.stats.speculation.num_accepted_tokens == alone.stats.speculation.num_accepted_tokens > 10


@pytest.mark.parametrize("inside", [False, True])
def test_the_config_it_is_made_with(inside: bool) -> None:
    config: dict[str, Any] = {
        "model": f"{HERE}.Recording",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 7,
    }
    whole = {"method": "chain", "drafters": [config], "num_speculative_tokens": 9} if inside else config
    engine(whole, max_num_seqs=5)
    made = Recording.made.pop()
    given = made.config
    assert made.loaded_with == [None]
    assert given.speculative_config.num_speculative_tokens == 3
    assert given.model_config.max_model_len == 256
    assert given.scheduler_config.max_num_seqs == 5
    assert given.speculative_config.prompt_lookup_max == 7
    assert given.speculative_config.prompt_lookup_min is None  # vLLM's keys are all there
    assert (given.speculative_config.method, given.speculative_config.model) == (
        "custom_class",
        f"{HERE}.Recording",
    )


def test_what_it_is_given_is_what_was_sampled_and_what_is_known() -> None:
    """Prompts in chunks and several requests: all sampled ids are the output, and each row ends in them."""
    llm = engine({"model": f"{HERE}.Recording"}, max_num_seqs=2, max_num_batched_tokens=16)
    outputs = llm.generate([REPEATS, prompts()[0]], GREEDY, use_tqdm=False)
    calls = Recording.made.pop().calls
    texts = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    seen: dict[int, list[int]] = {0: [], 1: []}
    for sampled, lengths, tokens in calls:
        assert (
            lengths.shape == (2,) and tokens.shape == (2, 256) and tokens.dtype == lengths.dtype == np.int32
        )
        for row, ids in enumerate(sampled):
            known = tokens[row, : lengths[row]].tolist()
            (which,) = [i for i, text in enumerate(texts) if text[: len(known)] == known]
            assert not ids or known[-len(ids) :] == ids
            seen[which] += ids
    assert [] in [ids for sampled, _, _ in calls for ids in sampled]  # an unfinished prompt
    for i, output in enumerate(outputs):
        ids = output.outputs[0].token_ids
        assert seen[i][: len(ids) - 1] == ids[:-1]
    assert any(len(ids) > 1 for sampled, _, _ in calls for ids in sampled)


def test_draft_asks_it_about_any_text() -> None:
    llm = engine({"model": NGRAM})
    tokens = llm.tokenizer.encode(REPEATS)
    assert (
        llm.draft(tokens[:-1], 4, next_token=tokens[-1])
        == llm.draft(tokens[:-1], 4, next_token=tokens[-1])
        != []
    )


class Arrays(Recording):
    def propose(self, *args: Any, **kwargs: Any) -> Any:
        lists = super().propose(*args, **kwargs)
        return torch.tensor([[*ids, 0, 0][:2] for ids in lists])


class Leaves(Recording):
    def propose(self, *args: Any, **kwargs: Any) -> Any:
        raise SystemExit(3)


class MeddlesWithTheDevice(Recording):
    """Changes global settings without restoring them, and returns ids as one tensor per request."""

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        lists = super().propose(*args, **kwargs)
        drafts = [torch.tensor(ids, dtype=torch.int32) for ids in lists]
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        return drafts


class TooFew(Recording):
    def propose(self, *args: Any, **kwargs: Any) -> Any:
        return super().propose(*args, **kwargs)[1:]


class Words(Recording):
    def propose(self, *args: Any, **kwargs: Any) -> Any:
        return [["word"] for _ in args[0]]


class Raises(Recording):
    def propose(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("no idea")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Arrays", ""),
        ("MeddlesWithTheDevice", ""),
        ("TooFew", "propose returned drafts for"),
        ("Words", "a draft is of type str"),
        ("Raises", "no idea"),
        ("Leaves", "SystemExit: 3"),
    ],
)
def test_what_it_returns_is_taken_or_counted_as_a_fault(name: str, fault: str) -> None:
    llm = engine({"model": f"{HERE}.{name}", "max_faults": 10_000})
    before = torch.get_default_device(), torch.get_default_dtype()
    assert not compare(run(LLM(dtype="float32", max_model_len=256)), run(llm))
    sandbox = llm.engine.runner.drafter
    assert sandbox is not None and (sandbox.num_faults > 0) == bool(fault) and fault in sandbox.last_fault
    assert (llm.stats.speculation.num_draft_tokens > 0) == (not fault)
    assert (torch.get_default_device(), torch.get_default_dtype()) == before


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model": f"{HERE}.Raises"}, "Raises"),
        ({"model": f"{HERE}.Raises", "max_model_len": 200}, "Raises"),
        (
            {"method": "chain", "drafters": [{"method": "suffix"}, {"model": f"{HERE}.Raises"}]},
            "Raises",
        ),
    ],
)
def test_the_warning_names_the_users_class(config: dict[str, Any], name: str) -> None:
    llm = engine({**config, "max_faults": 2})
    with pytest.warns(RuntimeWarning, match=f"^drafter {name} switched off after 2 faults"):
        run(llm)


class OneMore:
    def __init__(self, config: Any) -> None: ...

    def propose(
        self, sampled: Any, lengths: Any, tokens: Any, extra: Any, slot_mappings: Any = None
    ) -> Any: ...


class NoMappings:
    def __init__(self, config: Any) -> None: ...

    def propose(self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any) -> Any: ...


class OtherNames:
    @staticmethod
    def propose(ids: Any, lengths: Any, tokens: Any, **more: Any) -> Any: ...


class Ours:
    spec = DraftSpec()

    def propose(self, *args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("maker", "is_one"),
    [
        (NgramProposer, True),
        (Recording, True),
        (Arrays, True),
        (OtherNames, True),
        (Moody, False),
        (Ours, False),
        (OneMore, False),
        (NoMappings, False),
        (dict, False),
        (len, False),
    ],
)
def test_it_is_told_by_how_propose_can_be_called(maker: Any, is_one: bool) -> None:
    assert vllm_proposer.is_proposer(maker) is is_one


@pytest.mark.parametrize("name", ["OneMore", "NoMappings"])
def test_a_class_of_neither_kind_is_told_both(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"spec = DraftSpec.*propose\(sampled_token_ids, .*slot_mappings=None\)"
    ):
        engine({"model": f"{HERE}.{name}"})


TOP = "from vllm.config import VllmConfig\nclass Mine: ..."
LATE = "class Mine:\n  def propose(self, a, b, c, slot_mappings): ...\n  def __init__(self, config):\n    import vllm"
OTHER = "import vllm_tools\nclass Mine: ..."


@pytest.mark.parametrize(("code", "named"), [(TOP, True), (LATE, True), (OTHER, False)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_class_that_needs_vllm_gets_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, named: bool, inside: bool
) -> None:
    module = f"for_vllm_{len(code)}_{inside}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config: dict[str, Any] = {"method": "custom_class", "model": f"{module}.Mine"}
    config = {"method": "chain", "drafters": [config]} if inside else config
    with pytest.raises(ValueError) as caught:
        engine(config)
    message = str(caught.value)
    assert f"'{module}.Mine'" in message and "\n" not in message
    assert ("imports vllm, which is not installed" in message and "TYPE_CHECKING" in message) == named
