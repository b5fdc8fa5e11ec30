"""The commands, over a fake engine: what they read, print and return."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, assets
from draftproof.bench.compare import compare
from draftproof.cli import demo, generate, options
from draftproof.cli.main import COMMANDS, main
from draftproof.cli.prompts import Prompt, read_file
from draftproof.config import EngineConfig
from draftproof.types import Logprob, RequestOutput, SamplingParams
from tests.cli.fake_llm import TEXT, TOKENIZER, Engines, FakeLLM


def _flags(command: Any) -> list[str]:
    """The names of a command's flags that are explained, in the order of --help."""
    return [param.name for param in reversed(command.__click_params__) if param.help]


def test_the_example_of_a_stop_string_gives_a_shell_a_newline() -> None:
    line = next(line for line in generate.EXAMPLES.splitlines() if "--stop" in line)
    words = line.replace("draftproof", "printf '%s\\0'", 1)
    printed = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True).stdout
    assert printed.split("\0")[-3:] == ["--stop", "\n", ""]


class TestFlags:
    def test_every_field_has_a_flag(self) -> None:
        engine: Any = options.engine_flags(print)
        assert [f.name for f in dataclasses.fields(EngineConfig)] == _flags(engine)
        sampling: Any = options.sampling_flags(print)
        names = [f.name for f in dataclasses.fields(SamplingParams)]
        assert [name for name in names if name not in ("detokenize", "seed", "structured_outputs")] == _flags(
            sampling
        )

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

    def test_help_of_bench_shows_whole_sentences(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "--help"]) == 0
        listed = capsys.readouterr().out.split("Commands:")[1].split("Examples:")[0]
        assert "..." not in listed and "as soon as one of the batch is done." in " ".join(listed.split())


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
        self, engines: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo, "transformers_speed", lambda *_: 1.0)
        assert main(["demo", "--max-tokens", "5", "--batch-size", "4"]) == 0
        out = capsys.readouterr().out
        assert "greedy, transformers  \u2588 1 tok/s" in out.splitlines()
        assert TEXT in out
        assert "plain tok/s" in out and "tau" in out
        assert out.splitlines()[-1].startswith("identical: yes (180 tokens of 36 outputs;")
        assert [e.drafting for e in engines] == [True, False]

    def test_speeds_are_of_decoding(self, capsys: pytest.CaptureFixture[str]) -> None:
        """They begin when all have their first tokens; with those it is another figure."""
        runs = []
        for latency, seconds in ((1.0, 10.0), (2.0, 5.0)):
            runs.append(demo.Timed())
            outputs = FakeLLM({}).generate([TEXT, TEXT], [SamplingParams(max_tokens=n) for n in (4, 2)])
            for output, first in zip(outputs, (latency, 0.5), strict=True):
                output.metrics.first_token_latency = first
            runs[-1].add(outputs, seconds)
        assert [(run.reading_seconds, run.decoding_seconds) for run in runs] == [(1.0, 9.0), (2.0, 3.0)]
        assert [run.tokens_per_second for run in runs] == [pytest.approx(4 / 9), pytest.approx(4 / 3)]
        demo.print_reading(*runs)
        out = capsys.readouterr().out
        assert (
            "first tokens took 1.0 s plain and 2.0 s speculative; if that is counted, greedy is 2.00x" in out
        )

    def test_fails_when_not_identical(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        engines.change = "token"
        assert main(["demo", "--max-tokens", "5", "--batch-size", "4", "--no-transformers"]) == 1
        out = capsys.readouterr().out
        assert "identical: NO" in out and "transformers" not in out

    def test_bars_are_as_long_as_speeds_are_high(self, capsys: pytest.CaptureFixture[str]) -> None:
        demo.print_bars({"plain": 50.0, "speculative": 100.0, "other": 0.1}, color=False)
        lines = capsys.readouterr().out.splitlines()
        assert [line.count("\u2588") for line in lines] == [demo.BAR // 2, demo.BAR, 1]
        assert lines[0].endswith(" 50 tok/s")

    def test_transformers_is_measured_on_the_same_model(self) -> None:
        model = str(assets.path(assets.TARGET))
        with LLM(model, device="cpu") as llm:
            assert demo.transformers_speed(llm, {"model": model}, [Prompt("0", "def f")], 32) > 0


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

    def test_warnings_of_the_package_are_one_sentence(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def warn(engine: dict[str, Any]) -> None:
            for file in (options.__file__, "elsewhere.py"):
                text = warnings.formatwarning("it is slow", UserWarning, file, 7, "line of code")
                print(text, end="", file=sys.stderr)
            raise ValueError("the end")

        usual = warnings.formatwarning
        monkeypatch.setattr(options, "make_llm", warn)
        assert main(["generate", "x"]) == 2
        own, *others = capsys.readouterr().err.splitlines()
        assert own == "warning: it is slow"
        assert others[0] == "elsewhere.py:7: UserWarning: it is slow"
        assert warnings.formatwarning is usual

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

    def test_a_full_disk_is_told_in_one_line(self) -> None:
        command = [sys.executable, "-m", "draftproof", "--help"]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")

    def test_a_command_that_there_is_not_is_answered_with_the_nearest(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["genrate", "x"]) == 2
        assert "no such command 'genrate': did you mean 'generate'?" in capsys.readouterr().err


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
