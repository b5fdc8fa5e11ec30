"""Further training of a head, `python -m bench.training`, on the embedded model and its EAGLE-3 head."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench.training import __main__ as command
from bench.training import answers, loop
from bench.training.head import Head
from bench.training.loss import soft_cross_entropy, weighted
from bench.training.settings import Settings
from bench.training.target import Target
from draftproof import LLM, SamplingParams, assets
from draftproof.frontend.text import Tokenizer

CPU = torch.device("cpu")
SETTINGS = Settings(max_prompt_tokens=16, max_tokens=32, num_drafts=3, tokens_per_step=256)
PROMPTS = [[40 + i, 50, 60 + 2 * i, 70] for i in range(5)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(assets.path("tiny"), SETTINGS.num_positions, CPU)


@pytest.fixture(scope="module")
def texts(target: Target) -> list[answers.Text]:
    found = answers.answer(target, PROMPTS, [0.0] * len(PROMPTS), SETTINGS.max_tokens, [])
    return [answers.Text(torch.tensor(p + a), len(p), 0.0) for p, a in zip(PROMPTS, found, strict=True)]


def make_learner(target: Target) -> loop.Learner:
    head = Head(assets.path("tiny-eagle3"), target, SETTINGS.num_positions)
    return loop.Learner(target, head, SETTINGS, soft_cross_entropy)


def weights(learner: loop.Learner) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in learner.head.weights.items()}


def test_answers_are_the_targets(target: Target) -> None:
    """Each token is the best one after all before it, as a single pass over the text has it."""
    tokenizer = Tokenizer(target.directory)
    long = tokenizer.encode("def add(a, b):\n    return a + b\n\n\ndef mean(values):\n    " * 4)[:62]
    prompts = [tokenizer.encode("import os\n"), long]  # whose answer lies in the cache's next part
    for prompt, tokens in zip(prompts, answers.answer(target, prompts, [0.0, 0.0], 20, []), strict=True):
        states, _ = target.read(torch.tensor([prompt + tokens]), [])
        logits = torch.nn.functional.linear(states[0], target.unembed_VH).float()[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == 20 and len(set(tokens)) > 5
        assert (logits.amax(-1) - chosen < 0.25).all()  # products of bf16 differ with their shape


def test_an_answer_ends_with_the_token_that_ends_it(target: Target) -> None:
    (whole,) = answers.answer(target, PROMPTS[:1], [0.0], 16, [])
    end = whole[10]
    (cut,) = answers.answer(target, PROMPTS[:1], [0.0], 16, [end])
    assert cut == whole[: whole.index(end) + 1]


def test_a_pass_is_at_the_place_of_the_token_that_it_reads(target: Target) -> None:
    """Given what pass 0 is given one place later, pass 1 makes the same keys."""
    head = make_learner(target).head
    tokens_NL, stream_NLH = torch.arange(40, 56)[None], torch.randn(1, 16, 256, dtype=torch.bfloat16)
    context: list[tuple[torch.Tensor, torch.Tensor]] = []
    bias_LL = torch.full((16, 16), -torch.inf, dtype=torch.bfloat16).triu(1)
    head.step(0, tokens_NL, stream_NLH, context, bias_LL)
    head.step(1, tokens_NL.roll(-1, 1), stream_NLH.roll(-1, 1), context, bias_LL)
    torch.testing.assert_close(context[1][0][:, :, :-1], context[0][0][:, :, 1:])


def test_later_passes_attend_to_tokens_before_and_to_their_own(target: Target) -> None:
    head = make_learner(target).head
    q_NALD = torch.randn(1, 4, 6, 64)
    context = [(torch.randn(1, 2, 6, 64), torch.randn(1, 2, 6, 64)) for _ in range(3)]
    bias_LL = torch.full((6, 6), -torch.inf).triu(1)
    found = head._attend(q_NALD, context, bias_LL)
    for at in range(6):
        keys, values = (
            torch.cat(
                [context[0][i][:, :, : at + 1], *(pair[i][:, :, at : at + 1] for pair in context[1:])], 2
            )
            for i in range(2)
        )
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q_NALD[:, :, at : at + 1], keys, values, enable_gqa=True
        )
        torch.testing.assert_close(found[:, :, at : at + 1], wanted)


def test_a_trained_head_is_read_as_one(target: Target, texts: Sequence[answers.Text]) -> None:
    """Its estimated tokens a round are near what the engine counts, and fall where one of its weights is lost."""
    learner = make_learner(target)
    found = loop.check(learner, texts)["greedy"]["tau"]
    assert 1.6 < found < 4
    learner.head.weights["layers.0.self_attn.v_proj.weight"].data.zero_()
    assert loop.check(learner, texts)["greedy"]["tau"] < found - 0.2


def test_the_gradient_is_that_of_the_loss() -> None:
    logits = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    p = 0.9 * torch.randn(6, 12, dtype=torch.float64).softmax(-1)
    weight = torch.rand(6, dtype=torch.float64)
    weighted(soft_cross_entropy, logits, p, weight).backward()
    given = logits.grad
    logits.grad = None
    (-(p * logits.log_softmax(-1)).sum(-1) * weight).sum().backward()
    assert given is not None and logits.grad is not None
    torch.testing.assert_close(given, logits.grad, rtol=1e-5, atol=1e-6)


def test_a_step_after_a_break_has_the_same_bits(
    target: Target, texts: Sequence[answers.Text], tmp_path: Path
) -> None:
    learner = make_learner(target)
    learner.learn(texts)
    learner.save(tmp_path / "checkpoint")
    other = make_learner(target)
    other.load(tmp_path / "checkpoint")
    for one in (learner, other):
        torch.manual_seed(3)
        one.learn(texts)
    mine, found = weights(learner), weights(other)
    assert (other.step, other.tokens_read) == (2, 2 * sum(len(text.tokens_T) for text in texts))
    assert all(torch.equal(mine[name], found[name]) for name in mine)


def test_steps_lower_the_loss(target: Target, texts: Sequence[answers.Text]) -> None:
    learner = make_learner(target)
    learner.step = loop.WARM_UP  # at the full rate
    first, *_, last = (float(sum(learner.learn(texts)).detach()) for _ in range(4))
    assert last < first - 0.1


def test_texts_are_batched_once_each_within_the_size() -> None:
    texts = [answers.Text(torch.zeros(n), 1, 0.0) for n in range(5, 105)]
    source = loop.batches(texts, 256, random.Random(0))
    seen: list[int] = []
    while len(seen) < len(texts):
        some = next(source)
        assert len(some) * answers.up_to(max(len(t.tokens_T) for t in some), 16) <= 256
        seen += [len(t.tokens_T) for t in some]
    assert sorted(seen) == list(range(5, 105))


def test_the_rate_rises_stays_and_falls_by_the_clock() -> None:
    s = dataclasses.replace(SETTINGS, max_seconds=100.0, flat_share=0.2)
    late = 10 * loop.WARM_UP
    assert loop.share_of_rate(s, 0, 0.0) == pytest.approx(1 / loop.WARM_UP)
    shares = [loop.share_of_rate(s, late, t) for t in (0.0, 20.0, 60.0, 100.0, 120.0)]
    assert shares == pytest.approx([1.0, 1.0, 0.5, loop.LEAST_RATE, loop.LEAST_RATE])


def test_the_command_writes_a_head_that_drafts_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def f{i}(x, y):"}) for i in range(6)))
    folder = tmp_path / "head"
    tiny, start = str(assets.path("tiny")), str(assets.path("tiny-eagle3"))
    asked = [str(folder), "--prompt-file", str(prompts), "--model", tiny, "--start", start, "--device", "cpu"]
    few = [
        "--max-tokens",
        "8",
        "--max-seconds",
        "0.3",
        "--tokens-per-step",
        "128",
        "--stages",
        "answers,train",
    ]
    assert command.main(asked + few) == 0
    record = json.loads((folder / "train.json").read_text())
    assert record["trained_on"]["steps"] >= 1
    assert (record["target"]["hidden_size"], record["settings"]["max_tokens"]) == (256, 8)
    assert command.main(asked + few) == 0  # all seconds are spent: the same head
    assert (
        json.loads((folder / "train.json").read_text())["trained_on"]["steps"]
        == record["trained_on"]["steps"]
    )
    with pytest.raises(ValueError, match=r"train\.json: settings\.seed="):
        command.main([*asked, *few, "--seed", "1"])
    greedy = SamplingParams(temperature=0, max_tokens=24)
    with LLM(
        tiny, device="cpu", speculative_config={"model": str(folder), "num_speculative_tokens": 5}
    ) as llm:
        drafted = llm.generate("def add(a, b):", greedy, use_tqdm=False)[0]
    with LLM(tiny, device="cpu") as llm:
        plain = llm.generate("def add(a, b):", greedy, use_tqdm=False)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.speculation.acceptance_length > 1.2


def test_a_head_of_another_target_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="another target's"):
        Head(assets.path("smollm2-eagle3"), target, SETTINGS.num_positions)
    with pytest.raises(ValueError, match="start from an EAGLE-3 head"):
        Head(assets.path("smollm2-dflash"), target, SETTINGS.num_positions)
