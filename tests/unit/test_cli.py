"""The commands, over a fake engine: what they read, print and return."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof import assets
from draftproof.bench.compare import compare
from draftproof.cli import options
from draftproof.cli.main import COMMANDS, main
from draftproof.cli.prompts import read_file
from draftproof.config import EngineConfig
from draftproof.engine.text import Tokenizer
from draftproof.metrics import SpeculationStats
from draftproof.types import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput, SamplingParams

TOKENIZER = Tokenizer(assets.path(assets.TARGET))
TEXT = " return a + b # done"


class FakeLLM:
    """Says TEXT to everything. `change` alters outputs of engines that draft; `drafts` are proposed a round."""

    def __init__(self, engine: dict[str, Any], change: str = "", drafts: int = 3) -> None:
        self.engine, self.tokenizer = engine, TOKENIZER
        self.drafting = "speculative_config" in engine
        self.change = change if self.drafting else ""
        self.num_drafts = drafts if self.drafting else 0
        self.seen: list[Any] = []

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.5)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool = True) -> list[RequestOutput]:
        listed = params if isinstance(params, list) else [params] * len(prompts)
        self.seen += zip(prompts, listed, strict=True)
        return [self.answer(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, listed, strict=True))]

    def answer(self, index: int, prompt: Any, params: SamplingParams) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        stats = SpeculationStats()
        if self.num_drafts:
            stats.record(self.num_drafts, self.num_drafts - 1)
        if text == "too long":
            error = "prompt has 9 tokens, max_model_len=8"
            return RequestOutput("0", text, ids, [], True, RequestMetrics(stats), error=error)
        out = TOKENIZER.encode(TEXT)[: params.max_tokens]
        if self.change == "token" and index == 1:
            out[2] = 77
        shift = 1e-7 if self.change == "logprob" else 0.0
        logprobs = [{i: Logprob(-0.25 + shift, 1, "x"), 9: Logprob(-1.5, 2, "y")} for i in out]
        choice = CompletionOutput(0, TOKENIZER.decode(out), out, -0.5, logprobs, "length", None)
        return RequestOutput("0", text, ids, [choice], True, RequestMetrics(stats))

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[Delta]:
        self.seen.append((prompt, params))
        ids = TOKENIZER.encode(TEXT)
        for first in range(0, len(ids), 2):
            chunk = ids[first : first + 2]
            yield Delta("0", 0, TOKENIZER.decode(chunk), chunk, [True, False][: len(chunk)])

    def draft(self, ids: list[int], k: int, next_token: int | None = None) -> list[int]:
        target = TOKENIZER.encode(TEXT)
        assert next_token == target[0]
        return [*target[1:3], 77, *target[4:]][:k]


class Engines(list[FakeLLM]):
    """The engines that a command made; what they do is set before it runs."""

    change, drafts = "", 3

    def make(self, engine: dict[str, Any]) -> FakeLLM:
        self.append(FakeLLM(engine, self.change, self.drafts))
        return self[-1]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(options, "make_llm", made.make)
    monkeypatch.setenv("COLUMNS", "200")
    return made


class TestFlags:
    def test_every_field_has_a_flag(self) -> None:
        assert {f.name for f in dataclasses.fields(EngineConfig)} == set(options.ENGINE_HELP)
        without = {"detokenize", "seed"}
        assert {f.name for f in dataclasses.fields(SamplingParams)} - without == set(options.SAMPLING_HELP)

    def test_only_given_flags_reach_the_library(self, engines: Engines) -> None:
        line = (
            'generate x --seed 3 --no-exact --dtype float32 --stop A --stop B --logit-bias {"5":-1} --top-k 4'
        )
        assert main([*line.split(), "--no-speculation"]) == 0
        assert engines[0].engine == {"seed": 3, "exact": False, "dtype": "float32"}
        params = engines[0].seen[0][1]
        assert params == SamplingParams(temperature=0.5, stop=["A", "B"], logit_bias={5: -1}, top_k=4)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("ngram", {"method": "ngram"}),
            ("org/head", {"model": "org/head"}),
            (
                '{"method": "ngram", "num_speculative_tokens": 2}',
                {"method": "ngram", "num_speculative_tokens": 2},
            ),
        ],
    )
    def test_drafter_is_a_method_a_directory_or_json(
        self, engines: Engines, value: str, expected: dict[str, Any]
    ) -> None:
        assert main(["generate", "x", "--speculative-config", value]) == 0
        assert engines[0].engine["speculative_config"] == expected

    def test_embedded_model_comes_with_its_drafter(self, engines: Engines) -> None:
        assert main(["generate", "x"]) == main(["generate", "x", "--model", "m"]) == 0
        assert Path(engines[0].engine["speculative_config"]["model"]).is_dir()
        assert engines[1].engine == {"model": "m"}

    @pytest.mark.parametrize("name", [*COMMANDS])
    def test_help_shows_examples(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([name, "--help"]) == 0
        assert f"  draftproof {name}" in capsys.readouterr().out.split("Examples:")[1]


class TestGenerate:
    def test_one_prompt_is_streamed(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["generate", "def f"]) == 0
        assert capsys.readouterr().out == TEXT + "\n"

    def test_accepted_tokens_are_coloured(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["generate", "def f", "--color"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("\x1b[32m return\x1b[0m a\x1b[32m +\x1b[0m b")

    def test_file_gives_json_lines(
        self, engines: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text('{"id": "a", "prompt": "x"}\n\n{"task_id": "b", "prompt": "y"}\n')
        assert main(["generate", "--prompt-file", str(path), "--json", "--max-tokens", "3"]) == 0
        first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert (first["id"], second["id"]) == ("a", "b")
        assert first["outputs"][0]["token_ids"] == TOKENIZER.encode(TEXT)[:3]
        assert first["metrics"]["speculation"]["acceptance_length"] == 3.0

    def test_one_bad_prompt_does_not_stop_the_others(
        self, engines: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "p.txt"
        path.write_text("too long\nfine\n")
        assert main(["generate", "--prompt-file", str(path)]) == 1
        out, err = capsys.readouterr()
        assert TEXT in out
        assert err == "error: prompt 1: prompt has 9 tokens, max_model_len=8\n"

    def test_chat_goes_through_the_template(self, engines: Engines) -> None:
        assert main(["generate", "--chat", "hello"]) == 0
        ids = engines[0].seen[0][0]["prompt_token_ids"]
        shown = TOKENIZER.decode(ids, skip_special_tokens=False)
        assert shown == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


class TestPromptFiles:
    def test_formats_of_the_benchmarks_are_read(self, tmp_path: Path) -> None:
        path = tmp_path / "p.jsonl"
        items = [
            {"task_id": "HumanEval/4", "prompt": "def f():\n"},
            {"id": "g", "messages": [{"role": "user", "content": "q1"}], "reference": "1"},
            {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
            {"question": "q2", "answer": "#### 5"},
        ]
        path.write_text("\n".join(map(json.dumps, items)))
        found = read_file(path)
        assert [(p.id, p.text) for p in found[:1]] == [("HumanEval/4", "def f():\n")]
        assert [p.messages and p.messages[-1]["content"] for p in found[1:]] == ["q1", "first", "q2"]
        assert [p.id for p in found[1:]] == ["g", "81", "4"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "line 1: not valid JSON"),
            ("[]", "line 1: must be an object"),
            ('{"promt": "x"}', "line 1: has keys promt; needs 'prompt'"),
            ("\n", "holds no prompt"),
        ],
    )
    def test_bad_files_are_named(
        self, engines: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
    ) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text(content)
        assert main(["generate", "--prompt-file", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: --prompt-file ") and message in err and err.count("\n") == 1

    def test_demo_has_enough_prompts(self) -> None:
        assert len(read_file(assets.path(assets.PROMPTS))) >= 16


class TestVerify:
    SHORT = ("verify", "--limit", "3", "--max-tokens", "4")

    def test_equal_runs_are_identical(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*self.SHORT]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        last = lines[-1]
        assert "compared with plain" in first and lines[1].split()[-3:] == ["drafted", "accepted", "equal"]
        assert last.startswith(
            "identical: yes (192 tokens and 384 log-probabilities of 48 outputs; 72 drafts"
        )
        assert [e.engine["max_num_seqs"] for e in engines] == [1, 1, 1, 1, 8, 8, 8, 8]
        assert [e.engine["max_num_batched_tokens"] for e in engines] == [2048, 2048, 48, 48] * 2
        assert [e.drafting for e in engines] == [False, True] * 4
        seeds = [params.seed for _, params in engines[0].seen]
        temperatures = [params.temperature for _, params in engines[0].seen]
        assert (seeds, temperatures) == ([0, 1, 2] * 2, [0.0] * 3 + [0.8] * 3)

    def test_help_shows_its_own_defaults_and_no_flag_that_it_refuses(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["verify", "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "Longest output, in tokens. [default: 64]" in shown
        for flag in ("--temperature", "--max-num-seqs"):
            assert f"{flag} " not in shown
            assert main([*self.SHORT, flag, "1"]) == 2
            assert f"{flag}: use --batch-sizes" in capsys.readouterr().err

    def test_one_wrong_token_is_found(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        engines.change = "token"
        assert main([*self.SHORT, "--batch-sizes", "2", "--chunk-sizes", "64", "--temperatures", "0"]) == 1
        out = capsys.readouterr().out
        assert "speculative, batch 2, chunk 64, temperature 0: prompt code-1" in out
        assert "request 1, choice 0, position 2: token differs" in out
        assert "rank 1: 77 'x' -0.25; rank 2: 9 'y' -1.5" in out
        assert out.splitlines()[-1] == "identical: NO, 1 of 6 outputs differ"

    def test_one_wrong_bit_of_a_logprob_is_found(
        self, engines: Engines, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engines.change = "logprob"
        assert main([*self.SHORT]) == 1
        assert "position 0: logprob differs" in capsys.readouterr().out

    def test_no_draft_proves_nothing(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        engines.drafts = 0
        assert main([*self.SHORT]) == 1
        assert "nothing was drafted" in capsys.readouterr().out

    def test_a_prompt_that_cannot_be_served_plainly_is_the_callers_mistake(
        self, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "p.txt"
        path.write_text("too long\nfine\n")
        assert main(["verify", "--prompt-file", str(path)]) == 2
        assert "1: prompt has 9 tokens, max_model_len=8" in capsys.readouterr().err

    def test_needs_a_drafter(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", "--model", str(assets.path("tiny"))]) == 2
        assert "name the drafter" in capsys.readouterr().err


class TestDraft:
    def test_drafts_stand_beside_the_target(
        self, engines: Engines, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["draft", "def f", "-k", "4"]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == "2 of 4 drafts would be accepted"
        assert "77" in out
        assert engines[0].engine["speculative_config"]["num_speculative_tokens"] == 4

    def test_json(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["draft", "def f", "-k", "2", "--json"]) == 0
        target = TOKENIZER.encode(TEXT)
        expected = {"next_token": target[0], "drafts": target[1:3], "target": target[1:3], "num_accepted": 2}
        assert json.loads(capsys.readouterr().out) == expected


class TestDemo:
    def test_says_identical_and_shows_speed(
        self, engines: Engines, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["demo", "--max-tokens", "5", "--batch-size", "4"]) == 0
        out = capsys.readouterr().out
        assert TEXT in out
        assert "plain tok/s" in out and "tau" in out
        assert out.splitlines()[-1].startswith("identical: yes (160 tokens of 32 outputs;")
        assert [e.drafting for e in engines] == [True, False]

    def test_fails_when_not_identical(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        engines.change = "token"
        assert main(["demo", "--max-tokens", "5", "--batch-size", "4"]) == 1
        assert "identical: NO" in capsys.readouterr().out


class TestEnds:
    @pytest.mark.parametrize(
        ("error", "status", "said"),
        [
            (KeyboardInterrupt(), 130, "\ninterrupted\n"),
            (ValueError("top_p=3: must be at most 1"), 2, "error: top_p=3: must be at most 1\n"),
        ],
    )
    def test_errors_end_in_one_line(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        error: BaseException,
        status: int,
        said: str,
    ) -> None:
        def fail(engine: dict[str, Any]) -> None:
            raise error

        monkeypatch.setattr(options, "make_llm", fail)
        assert main(["generate", "x"]) == status
        assert capsys.readouterr().err == said

    def test_traceback_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(engine: dict[str, Any]) -> None:
            raise ValueError("inside")

        monkeypatch.setattr(options, "make_llm", fail)
        with pytest.raises(ValueError, match="inside"):
            main(["--traceback", "generate", "x"])

    @pytest.mark.parametrize("line", ["nothing", "generate x --dtype int3", "generate x --logit-bias 5"])
    def test_wrong_usage_is_status_2(
        self, engines: Engines, capsys: pytest.CaptureFixture[str], line: str
    ) -> None:
        assert main(line.split()) == 2
        assert "Error" in capsys.readouterr().err

    def test_reader_that_leaves_gets_no_traceback(self) -> None:
        read_end, write_end = os.pipe()
        os.close(read_end)
        command = [sys.executable, "-m", "draftproof", "--help"]
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
        os.close(write_end)
        assert (done.returncode, done.stderr) == (1, "")


class TestCompare:
    def outputs(self) -> list[RequestOutput]:
        return FakeLLM({}).generate(["a", "b"], SamplingParams(max_tokens=4))

    def test_equal_runs_have_no_difference(self) -> None:
        assert compare(self.outputs(), self.outputs()) == []

    @pytest.mark.parametrize(
        ("what", "position", "change"),
        [
            ("token", 3, lambda c: c.token_ids.__setitem__(3, 5)),
            ("length", 3, lambda c: c.token_ids.pop()),
            ("logprob", 1, lambda c: c.logprobs.__setitem__(1, {})),
            ("logprob", 2, lambda c: setattr(c.logprobs[2][9], "rank", 3)),
            ("logprob", 4, lambda c: setattr(c, "cumulative_logprob", -0.5000001)),
            ("logprob", 0, lambda c: setattr(c, "logprobs", None)),
            ("finish", 4, lambda c: setattr(c, "finish_reason", "stop")),
            ("finish", 4, lambda c: setattr(c, "stop_reason", 7)),
            ("text", 4, lambda c: setattr(c, "text", "x")),
        ],
    )
    def test_each_kind_of_difference_is_found(self, what: str, position: int, change: Any) -> None:
        changed = self.outputs()
        change(changed[1].outputs[0])
        for first, second in ((self.outputs(), changed), (changed, self.outputs())):
            found = compare(first, second)
            assert [(d.request, d.choice, d.position, d.what) for d in found] == [(1, 0, position, what)]

    def test_prompt_logprobs_count(self) -> None:
        plain, other = self.outputs(), self.outputs()
        plain[0].prompt_logprobs = [None, {4: Logprob(-1.0, 1)}]
        other[0].prompt_logprobs = [None, {4: Logprob(-1.0000001, 1)}]
        assert [(d.what, d.position) for d in compare(plain, other)] == [("prompt logprob", 1)]

    def test_different_numbers_of_outputs_are_refused(self) -> None:
        with pytest.raises(ValueError, match="2 outputs against 1"):
            compare(self.outputs(), self.outputs()[:1])
