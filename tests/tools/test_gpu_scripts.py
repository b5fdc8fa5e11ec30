"""What the scripts for a GPU compute from what they see: idle time, rooflines, and whether an engine passes."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest

from draftproof import SamplingParams
from draftproof.bench import rooflines, stages, timeline
from draftproof.bench.timeline import Event, Timeline
from draftproof.models import config as model_config
from draftproof.models import cost
from tests.gpu import exactness, settings, steady

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192},
}


def test_overlapping_and_touching_intervals_become_one() -> None:
    assert timeline.merge([(5, 6), (0, 2), (1, 4), (4, 5), (8, 9), (1, 2)]) == [(0, 6), (8, 9)]
    assert timeline.merge([]) == []


def test_idle_time_is_what_no_kernel_covers() -> None:
    kernels = [(0, 40), (30, 50), (60, 100)]
    assert timeline.gaps(kernels) == [10]
    assert timeline.idle_share(kernels) == pytest.approx(0.1)
    assert timeline.idle_share(kernels, shortest=11) == 0
    assert timeline.idle_share([(3, 7)]) == 0
    assert timeline.idle_share([]) == 1


def test_copies_are_no_kernels_and_the_first_tenth_does_not_count() -> None:
    work = [Event("a", 0, 50), Event("Memcpy DtoH", 100, 200), Event("b", 250, 400), Event("a", 900, 1000)]
    line = Timeline(work, [Event("cudaEventSynchronize", 50, 60), Event("cudaEventSynchronize", 500, 510)])
    later = line.steady()
    assert later.kernels() == [(250, 400), (900, 1000)]
    assert timeline.total(later.waits) == 10
    assert line.largest(2) == [("a", 150, 2), ("b", 150, 1)]


def test_a_recorded_run_has_events_in_order() -> None:
    import torch

    line = timeline.record(lambda: [torch.ones(9).sum() for _ in range(3)] and None, "cpu")
    assert any(e.name == "aten::sum" for e in line.work)
    assert all(e.end >= e.start for e in line.work)
    assert 0 <= timeline.idle_share(line.kernels()) <= 1


class Waiting:
    """Stands for requests whose steps make the host wait twice each."""

    def steps(self, count: int) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        for _ in range(2 * count):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


def test_a_line_that_waits_is_named_with_how_often() -> None:
    found = steady.waiting_calls(Waiting(), 3, "cpu")  # type: ignore[arg-type]
    assert list(found.values()) == [6]
    assert next(iter(found)).startswith(__file__)


def test_a_pass_of_the_8b_shape_reads_15_gigabytes_and_its_keys() -> None:
    config = model_config.parse(LLAMA)
    empty, full = (cost.target_pass(config, 1, 1, context) for context in (0, 1000))
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    assert empty.bytes == 2 * weights == 15_009_316_864
    assert empty.flops == 2 * weights
    assert rooflines.seconds(empty) == pytest.approx(3.13e-3, rel=1e-2)
    assert full.bytes - empty.bytes == 1000 * 32 * 2 * 8 * 128 * 2
    assert full.flops - empty.flops == 1000 * 32 * 4 * 32 * 128
    verify = cost.target_pass(config, 64, 6, 1000)
    assert verify.bytes - empty.bytes == 64 * (
        full.bytes - empty.bytes
    )  # a request's rows share what they read
    assert verify.flops == 64 * 6 * full.flops
    many = cost.target_pass(config, 1024, 1, 0)
    assert rooflines.seconds(many) == pytest.approx(1024 * 2 * weights / 790e12)


def test_a_windowed_layer_reads_its_window() -> None:
    plain = model_config.parse(LLAMA)
    windowed = [
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=100))
        for layer in plain.layers[:16]
    ]
    config = dataclasses.replace(plain, layers=(*windowed, *plain.layers[16:]))
    assert cost.attention(config, 1, 1, 1000).bytes == 16 * (100 + 1000) * 2 * 8 * 128 * 2


def test_the_exit_status_says_whether_all_checks_passed() -> None:
    log = stages.CheckLog()
    assert log.finish() == 1, "nothing checked is nothing proved"
    log.check("a", True, "")
    assert log.finish() == 0
    with log.guard("b"):
        raise RuntimeError("broken")
    assert log.failed == ["b"] and log.finish() == 1


def test_an_unknown_stage_is_named_and_a_broken_one_does_not_end_the_others() -> None:
    log, ran = stages.CheckLog(), []

    def broken() -> None:
        raise RuntimeError("broken")

    with pytest.raises(ValueError, match="nosuch"):
        stages.run_stages(log, "nosuch", {"a": broken})
    both = {"a": broken, "b": lambda: ran.append("b") or log.check("b", True, "")}
    assert stages.run_stages(log, "a,b", both) == 1
    assert ran == ["b"] and log.failed == ["a"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[exactness.Exactness, Any]:
    models = settings.Models("cpu", True, None, tmp_path_factory.mktemp("scratch"))
    run = exactness.Exactness(models, stages.CheckLog(), ["eager"], {"eager": ["batch 64", "mixed"]})
    return run, run.reference("tiny", exactness.scale_of("tiny", True))


def wrong_logprob(output: Any) -> Any:
    entry = output.outputs[0].logprobs[3]
    token = next(iter(entry))
    changed = {**entry, token: dataclasses.replace(entry[token], logprob=entry[token].logprob + 1e-7)}
    rows = [*output.outputs[0].logprobs[:3], changed, *output.outputs[0].logprobs[4:]]
    return dataclasses.replace(output, outputs=[dataclasses.replace(output.outputs[0], logprobs=rows)])


def wrong_id(output: Any) -> Any:
    ids = [*output.outputs[0].token_ids[:-1], 7]
    return dataclasses.replace(output, outputs=[dataclasses.replace(output.outputs[0], token_ids=ids)])


@pytest.mark.parametrize("wrong", [wrong_logprob, wrong_id])
def test_one_wrong_id_or_logprob_fails_the_exactness_script(prepared: Any, wrong: Any) -> None:
    run, expected = prepared
    scale = exactness.scale_of("tiny", True)
    drafting = run.models.drafter("tiny", "ngram")
    llm = run.engine("tiny", scale, exactness.ENGINES[1][0], drafting, "eager")
    requests, outputs = expected["greedy"]
    for given, failed in (
        (outputs, []),
        ([*outputs[:-1], wrong(outputs[-1])], ["tiny-ngram eager a greedy"]),
    ):
        run.log.failed.clear()
        run.check(
            "tiny-ngram eager", llm, exactness.Setting("a"), "greedy", (requests, given), exactness.Tally()
        )
        assert run.log.failed == failed


def test_settings_that_did_not_happen_fail_the_exactness_script(prepared: Any) -> None:
    run, expected = prepared
    llm = run.engine("tiny", exactness.scale_of("tiny", True), exactness.ENGINES[1][0], None, "eager")
    for setting in (exactness.Setting("a", preempts=True), exactness.Setting("b", runs=2)):
        run.log.failed.clear()
        run.check("tiny-plain eager", llm, setting, "greedy", expected["greedy"], exactness.Tally())
        assert run.log.failed == [f"tiny-plain eager {setting.name} greedy"]


def test_a_mixture_has_every_kind_of_request() -> None:
    found = exactness.mixture(exactness.Scale(), text=True)
    assert len(found) == 64 and len({p.max_tokens for p in found}) > 20
    plain = SamplingParams()
    for name in (
        "n",
        "stop",
        "logprobs",
        "prompt_logprobs",
        "repetition_penalty",
        "frequency_penalty",
        "top_p",
    ):
        assert any(getattr(p, name) != getattr(plain, name) for p in found), name


def test_prompts_are_all_different_and_of_many_lengths(prepared: Any, tmp_path: Path) -> None:
    run, _ = prepared
    llm = run.engine("tiny", exactness.scale_of("tiny", True), exactness.ENGINES[1][0], None, "eager")
    found = settings.token_prompts(llm, 64, 160)
    assert len({tuple(p[2:]) for p in found}) == 64
    assert {len(p) for p in found} <= set(range(20, 161)) and len({len(p) for p in found}) > 30


def test_stages_apart_get_the_other_flags_and_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\nprint(*sys.argv[1:])\nsys.exit(int('c' in sys.argv[-3]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    given = ["--models", "there", "--stages", "a,b,c", "--jobs", "2"]
    monkeypatch.setattr("sys.argv", ["script", *given])
    assert settings.run_apart("script", ["a", "b", "c"], 2) == 1
    *said, last = capsys.readouterr().out.splitlines()
    assert sorted(said) == [
        f"[{name}] {' '.join(given)} --stages {share} --jobs 1" for name, share in (("a", "a,b"), ("c", "c"))
    ]
    assert last == "1 of 2 processes passed, not all of c"
