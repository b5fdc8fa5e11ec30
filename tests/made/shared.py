"""Checkpoints that many tests use: those in the repository, and others made from them on first use.

Each is made once per process, in a temporary folder.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from draftproof import assets
from tests.made import derived, native, vocabularies
from tests.made.gemma import gemma4_pair

DATA = Path(__file__).parent.parent / "data"
TARGET = assets.path(assets.TARGET)
EAGLE3 = str(assets.path("tiny-eagle3"))
DRAFT = str(DATA / "draft")
MTP = str(DATA / "tiny-mtp")
DFLASH = str(DATA / "tiny-dflash")


def prompts() -> list[str]:
    lines = assets.path(assets.PROMPTS).read_text().splitlines()
    return [p["prompt"] for p in map(json.loads, lines) if "prompt" in p]


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """The process's temporary folder, removed when it ends."""
    return tempfile.TemporaryDirectory()


def _made() -> Path:
    return Path(_temporary().name)


@functools.cache
def eagle1() -> str:
    return str(derived.eagle_from_mtp(Path(MTP), TARGET, _made() / "eagle1"))


@functools.cache
def one_state() -> str:
    return str(derived.eagle3_of_one_state(Path(EAGLE3), TARGET, _made() / "one_state"))


@functools.cache
def peagle() -> str:
    return str(derived.peagle_from_eagle3(Path(EAGLE3), TARGET, _made() / "peagle"))


@functools.cache
def flat_fp8_peagle() -> str:
    flat = derived.flat_from_speculators(Path(peagle()), _made() / "flat", {"pard_token": 3})
    return str(derived.compressed_fp8(flat, _made() / "flat_fp8", "channel"))


@functools.cache
def pard() -> str:
    return str(derived.pard_from_model(Path(DRAFT), _made() / "pard"))


@functools.cache
def dspark() -> str:
    return str(derived.dspark_from_dflash(Path(DFLASH), _made() / "dspark"))


@functools.cache
def dflash2() -> str:
    return str(derived.dflash2_from_dflash(Path(DFLASH), _made() / "dflash2"))


@functools.cache
def xpress() -> str:
    return str(derived.xpress_from_dflash(Path(DFLASH), _made() / "xpress"))


@functools.cache
def fewer_tokens() -> str:
    """The draft model without a few of its tokens."""
    return str(vocabularies.reduced(Path(DRAFT), _made() / "fewer", every=20))


@functools.cache
def other_tokens() -> str:
    """The draft model with a tokenizer of its own."""
    return str(vocabularies.trained(Path(DRAFT), _made() / "other", prompts(), 800))


@functools.cache
def _gemma4() -> tuple[Path, Path, Path]:
    return gemma4_pair(TARGET, _made() / "gemma4")


def gemma4() -> str:
    """A target with layers that share keys and values."""
    return str(_gemma4()[0])


def gemma4_assistant() -> str:
    return str(_gemma4()[1])


def gemma4_centroids() -> str:
    """An assistant whose output tokens are grouped by centroids."""
    return str(_gemma4()[2])


@functools.cache
def _gemma4_experts() -> tuple[Path, Path, Path]:
    return gemma4_pair(TARGET, _made() / "gemma4_experts", experts=True)


def gemma4_experts() -> str:
    return str(_gemma4_experts()[0])


def gemma4_experts_assistant() -> str:
    return str(_gemma4_experts()[1])


@functools.cache
def deepseek() -> str:
    """A target with latent attention, experts and two prediction modules."""
    return str(native.deepseek(TARGET, _made() / "deepseek"))


@functools.cache
def mimo() -> str:
    """A target with ordinary attention and one prediction module."""
    return str(native.mimo(TARGET, _made() / "mimo"))
