"""What is exempt from Python's collections, and until when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from draftproof import LLM, assets
from draftproof.runtime import collector


class Node:
    """May be part of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    collector._open_owners.clear()
    yield
    gc.unfreeze()


def cycle() -> weakref.ref[Node]:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return weakref.ref(first)


def test_loaded_objects_are_not_looked_at_until_their_owner_is_freed() -> None:
    loaded, owner = Node(), Node()
    collector.exempt_loaded(owner)
    later = Node()
    seen = {id(found) for found in gc.get_objects()}
    assert id(loaded) not in seen
    assert id(later) in seen
    del owner
    assert id(loaded) in {id(found) for found in gc.get_objects()}


def test_garbage_is_freed_first_and_a_cycle_that_was_exempt_with_its_owner() -> None:
    garbage = cycle()
    owner = Node()
    owner.other = Node()
    kept = weakref.ref(owner.other)
    owner.other.other = owner.other
    collector.exempt_loaded(owner)
    assert garbage() is None
    del owner
    gc.collect()
    assert kept() is None


def test_an_exemption_can_be_ended_early_and_only_once() -> None:
    loaded, owner = Node(), Node()
    end = collector.exempt_loaded(owner)
    end()
    assert id(loaded) in {id(found) for found in gc.get_objects()}
    other = collector.exempt_loaded(loaded)
    end()
    del owner
    assert id(loaded) not in {id(found) for found in gc.get_objects()}
    other()


def test_the_end_of_one_exemption_leaves_that_of_others() -> None:
    loaded, first, second = Node(), Node(), Node()
    end, other = collector.exempt_loaded(first), collector.exempt_loaded(second)
    kept = cycle()
    end()
    assert id(loaded) not in {id(found) for found in gc.get_objects()}
    assert kept() is None, "garbage does not stay"
    other()
    assert id(loaded) in {id(found) for found in gc.get_objects()}


def test_an_engine_leaves_few_objects_to_collections_and_is_freed_with_all_its_parts() -> None:
    llm = LLM(str(assets.path("tiny")), max_num_seqs=2, speculative_config={"method": "ngram"})
    assert len(gc.get_objects()) < 10_000
    runner = weakref.ref(llm.core.runner)
    del llm
    gc.collect()
    assert runner() is None


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_while_held_back(was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    try:
        with collector.held_back():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
