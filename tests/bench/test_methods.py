"""`draftproof bench methods`: its rows, its verdict, its files, and what it says to wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, SamplingParams, assets
from draftproof.bench import harness, plots, report
from draftproof.bench.drive import Client, ClientResult, Job
from draftproof.bench.harness import Variant
from draftproof.bench.methods import Comparison, Question, find, is_right
from draftproof.cli.main import main
from tests.slow import slow

DATA = Path(__file__).parent.parent / "data"
QUICK = ["bench", "methods", "--repeats", "1", "--limit", "2", "--max-tokens", "24"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """methods.json and methods.md of everything that fits the embedded model."""
    folder = tmp_path_factory.mktemp("results")
    assert main([*QUICK, "--heads", str(DATA), "--output-dir", str(folder)]) == 0
    return json.loads((folder / "methods.json").read_text()), (folder / "methods.md").read_text()


@slow
def test_there_is_a_row_for_every_method(results: tuple[dict[str, Any], str]) -> None:
    found, page = results
    names = [row["name"] for row in found["methods"]]
    without_files = ["ngram", "suffix", "suffix, then eagle3"]
    assert names == ["plain", *without_files, "tiny-eagle3", "draft", "tiny-dflash", "tiny-mtp"]
    for name in names:
        assert f"\n| {name} |" in page


@slow
def test_plain_decoding_is_the_unit_of_speed(results: tuple[dict[str, Any], str]) -> None:
    plain, *drafting = results[0]["methods"]
    assert plain["speedup"] == 1 and plain["tau"] == 1 and plain["num_drafted"] == 0
    for row in drafting:
        assert row["speedup"] > 0 and row["speedup"] != 1


@slow
def test_answers_are_the_same_though_drafts_were_accepted(results: tuple[dict[str, Any], str]) -> None:
    found, page = results
    assert all(row["identical"] for row in found["methods"])
    assert "identical: yes (14 outputs" in page
    for row in found["methods"][4:]:
        assert row["num_accepted"] > 0 and row["num_faults"] == 0
        assert row["tau"] == pytest.approx(1 + sum(row["accepted_per_position"]))
    for row in found["methods"]:
        assert row["num_same"] == row["num_outputs"] and row["num_asked"] == 1
    assert "| same answers |" in page and page.count(" 2 of 2 |") == 7


@slow
def test_a_step_is_divided_into_its_parts(results: tuple[dict[str, Any], str]) -> None:
    rows = {row["name"]: row for row in results[0]["methods"]}
    for row in rows.values():
        assert row["verify_ms"] > row["rest_ms"] > 0
    # a network of layers against looking tokens up
    assert rows["draft"]["draft_ms"] > 2 * rows["ngram"]["draft_ms"]


def test_an_answer_that_differs_is_reported() -> None:
    def make(method: Variant) -> LLM:
        """Beside a drafter another target: that its answers differ does not hang on any rounding."""
        if method.config is None:
            return LLM(max_num_seqs=1)
        return LLM(str(DATA / "draft"), max_num_seqs=1, speculative_config=dict(method.config))

    question = Question(id="noise", token_ids=list(range(100, 140)))
    params = SamplingParams(temperature=1, max_tokens=48, ignore_eos=True)
    comparison = Comparison(make, [Variant("ngram", {"method": "ngram"})], [question], params)
    comparison.run()
    rows = comparison.records()
    assert [row["identical"] for row in rows] == [True, False]
    assert [row["num_same"] for row in rows] == [1, 0]
    assert report.identity(rows).startswith("identical: NO (ngram)")
    assert report.methods_table(rows)[-1].endswith("| 0 of 1 |")


def test_right_answers_are_those_of_the_reference() -> None:
    """Two of four questions have for a reference what the target says, two a number that is one higher."""
    llm = LLM(max_num_seqs=1)
    digits = [llm.tokenizer.encode(str(digit))[-1] for digit in range(10)]
    params = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=digits, ignore_eos=True)
    prompts = [[*llm.tokenizer.encode("total = "), digit] for digit in digits[:4]]
    said = [int(o.outputs[0].text) for o in llm.generate(prompts, params, use_tqdm=False)]
    references = [str(said[0]), str(said[1]), str(said[2] + 1), str(said[3] + 1)]
    pairs = zip(prompts, references, strict=True)
    questions = [Question(id=r, token_ids=p, reference=r) for p, r in pairs]

    def make(method: Variant) -> LLM:
        return LLM(max_num_seqs=1, **({"speculative_config": dict(method.config)} if method.config else {}))

    comparison = Comparison(make, [Variant("ngram", {"method": "ngram"})], questions, params)
    comparison.run()
    rows = comparison.records()
    assert [(row["num_right"], row["num_asked"]) for row in rows] == [(2, 4), (2, 4)]
    assert " right |" in report.methods_table(rows)[0]
    poor = [row | {"num_right": 0} for row in rows]
    assert " right |" not in report.methods_table(poor)[0], "a score that cannot fall says nothing"


@slow
def test_found_checkpoints_that_do_not_fit_are_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("oracle/eagle3", "oracle/target_qwen3", "tiny-mtp"):
        (tmp_path / Path(name).name).symlink_to(DATA / name)
    (tmp_path / "same").symlink_to(assets.path("tiny"))
    (tmp_path / "copy").mkdir()
    for path in assets.path("tiny").iterdir():
        (tmp_path / "copy" / path.name).symlink_to(path)
    command = [*QUICK, "--drafters", "ngram", "--heads", str(tmp_path), "--output-dir", str(tmp_path / "out")]
    assert main(command) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "methods.json").read_text())
    assert [row["name"] for row in found["methods"]] == ["plain", "ngram", "tiny-mtp"]
    assert len(found["notes"]) == 3
    for name, reason in (
        ("eagle3", "made for target_"),
        ("target_qwen3", "must share the target's tokenizer"),
        ("copy", "bytes"),
    ):
        assert any(n.startswith(f"{name} is left out: ") and reason in n for n in found["notes"]), found[
            "notes"
        ]
    assert "| tiny-mtp |" in out


def test_a_head_beside_another_target_is_not_even_tried(tmp_path: Path) -> None:
    for name, source in (
        ("tiny", assets.path("tiny")),
        ("tiny-mtp", DATA / "tiny-mtp"),
        ("draft", DATA / "draft"),
    ):
        (tmp_path / name).symlink_to(source)
    methods, notes = find(tmp_path, tmp_path / "tiny")
    assert ([m.name for m in methods], notes) == (["draft", "tiny-mtp"], [])
    methods, notes = find(tmp_path, tmp_path / "draft")
    assert methods == []
    assert [n.partition(":")[0] for n in notes] == ["tiny is left out", "tiny-mtp is left out"]
    assert notes[1].endswith("made for tiny")


@slow
def test_a_head_given_as_the_model_takes_part(tmp_path: Path) -> None:
    head = str(assets.path("tiny-eagle3"))
    assert main([*QUICK, "--model", head, "--drafters", "ngram", "--output-dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "methods.json").read_text())
    assert [row["name"] for row in found["methods"]] == ["plain", "ngram", "tiny-eagle3"]
    assert found["model"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafters", "a=ngram", "a=suffix"], "two are named 'a'"),
        (["--drafters", "plain=ngram"], "two are named 'plain'"),
        (["--drafters", '{"method": "ngram"}'], "give it a name"),
        (["--drafters", "a={"], "not valid JSON"),
        (["--drafters", "a=ngarm"], "did you mean 'ngram'"),
        (["--drafters", f"mine={DATA / 'oracle' / 'eagle3'}"], "another target"),
        (["--heads", str(DATA / "draft")], "holds no draft checkpoints"),
        (["--speculative-config", "ngram"], "use --drafters"),
        (["--max-num-seqs", "4"], "use --batch-size"),
        (["--prompts", "/nowhere.jsonl"], "cannot be read"),
        (["--max-model-len", "8"], "max_model_len=8"),
    ],
)
def test_wrong_input_is_answered_with_what_to_do(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "--output-dir", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("6 * 7 = 42\n#### 42", True),
        ("It is 1,042.", False),
        ("so 41, no: 42.0", True),
        ("#### 42 of 50", True),
        ("42\n#### 41", False),
        ("I cannot say", False),
        ("42\n####", False),
    ],
)
def test_the_final_number_is_the_answer(answer: str, right: bool) -> None:
    assert is_right(answer, "42") == right
    assert is_right(answer.replace("42", "-1,042"), "-1042") == right or answer == "It is 1,042."


@slow
def test_the_plot_is_drawn(results: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plots.draw_methods(tmp_path, results[0]["methods"]) == ["methods.png"]
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")


@slow
def test_a_column_about_which_nothing_is_known_is_left_out(results: tuple[dict[str, Any], str]) -> None:
    without = {"verify_ms": None, "draft_ms": None, "rest_ms": None, "num_right": 0, "num_asked": 0}
    head, *lines = report.methods_table([row | without for row in results[0]["methods"]])
    assert "verify ms" not in head and "right" not in head and "speed-up" in head
    assert {line.count("|") for line in lines} == {head.count("|")}


def test_what_was_measured_before_an_interruption_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Client):
        left = 8  # ngram: two engines warm up, then two prompts each; in the second repeat

        def run(self, jobs: Sequence[Job]) -> ClientResult:
            Interrupted.left -= 1
            if Interrupted.left < 0:
                raise KeyboardInterrupt
            return super().run(jobs)

    monkeypatch.setattr(harness, "Client", Interrupted)
    command = [*QUICK, "--repeats", "2", "--drafters", "ngram", "--drafters", "suffix"]
    assert main([*command, "--output-dir", str(tmp_path)]) == 130
    assert "| ngram |" in (out := capsys.readouterr().out) and "| suffix |" not in out
    assert "interrupted" in out


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        (
            'b={"method": "chain", "drafters": [{"method": "nope"}]}',
            r"b: speculative_config: drafters\[0\]: method='nope'",
        ),
        (
            'b={"method": "suffix", "suffix_decoding_max_tre_depth": 3}',
            "did you mean 'suffix_decoding_max_tree",
        ),
        ("b=no.such.Drafter", "b: .*cannot be imported"),
        ("b=no/such/folder", "b: .*no such directory"),
    ],
)
def test_every_drafter_is_checked_before_anything_is_loaded(
    drafter: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Comparison, "run", lambda self: pytest.fail("a model was loaded"))
    assert main([*QUICK, "--drafters", "ngram", drafter, "--output-dir", str(tmp_path)]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_drafter_that_fails_late_leaves_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(DATA / "oracle" / "eagle3")  # a head of another target, which shows when it is built
    command = [*QUICK, "--drafters", "ngram", f"mine={other}", "suffix", "--output-dir", str(tmp_path)]
    assert main(command) == 2
    said = capsys.readouterr()
    assert "| ngram |" in said.out and "error: mine: " in said.err
    found = json.loads((tmp_path / "methods.json").read_text())
    assert [row["name"] for row in found["methods"]] == ["plain", "ngram"]
    assert any("mine: " in note and "what was not measured is missing" in note for note in found["notes"])
