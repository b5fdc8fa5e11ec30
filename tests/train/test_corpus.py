"""Training prompts: determined by the seed, from every domain, and disjoint from the held-out ones."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from draftproof import assets
from draftproof.cli.prompts import read_file
from draftproof.train import corpus


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, object]]:
    return corpus.build(150, seed=1)


def test_prompts_are_the_same_for_a_seed(prompts: list[dict[str, object]]) -> None:
    assert corpus.build(150, seed=1) == prompts
    assert corpus.build(150, seed=2) != prompts


def test_every_domain_has_its_share(prompts: list[dict[str, object]]) -> None:
    counts = Counter(prompt["domain"] for prompt in prompts)
    assert counts == {"code": 87, "chat": 45, "prose": 18}
    assert len({json.dumps(prompt) for prompt in prompts}) == len(prompts)


def test_a_file_is_held_out_or_trained_on_but_not_both(prompts: list[dict[str, object]]) -> None:
    completions = [p for p in prompts if str(p["id"]).startswith("completion")]
    for prompt in completions:
        name = str(prompt["prompt"]).splitlines()[0].removeprefix("# ")
        assert corpus.Source(name, assets.path(assets.PROMPTS)).is_held_out == prompt["held_out"]


def test_about_one_in_twenty_is_held_out(prompts: list[dict[str, object]]) -> None:
    assert 0 < sum(bool(prompt["held_out"]) for prompt in prompts) < len(prompts) / 8


def test_the_demos_prompts_are_of_other_packages() -> None:
    demo = [prompt.text for prompt in read_file(assets.path(assets.PROMPTS)) if prompt.text]
    for package in corpus.SOURCES:
        assert package not in corpus.DEMO_PACKAGES
        assert not any(text.startswith(f"# {package}/") for text in demo)


def test_licences_and_versions_are_told() -> None:
    told = corpus.versions()
    assert told["numpy"]["licence"] == "BSD-3-Clause"
    assert told["numpy"]["version"]
    assert told[corpus.STANDARD_LIBRARY]["licence"] == "PSF-2.0"
