import gc
import weakref

import pytest

from unified_ckpt.geometry.tensors.collector import collector_paused


class Node:
    """An object that can stand in a cycle."""


def test_no_collection_runs_inside_and_the_former_state_comes_back() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_program_that_has_switched_the_collector_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_cycles_made_inside_are_found_afterwards() -> None:
    with collector_paused():
        node = Node()
        node.self = node
        seen = weakref.ref(node)
        del node
        assert seen() is not None
    gc.collect()
    assert seen() is None
