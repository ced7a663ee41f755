"""Rings of nodes: who keeps whose copy, what moves at a restore, which state is whole."""

import random
from itertools import combinations

import pytest

from unified_ckpt.tiers.copies import NodeCopy
from unified_ckpt.tiers.plan import CopyPlan, newest_state, plan_copies, plan_restore


def copy_of(ranks: tuple[int, ...], world_size: int, step: int = 1, token: str = "a") -> NodeCopy:
    return NodeCopy(step=step, token=token * 16, ranks=ranks, world_size=world_size)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("copies", [0, 1, 2, 4])
def test_every_node_has_its_copies_on_others_and_keeps_as_many(num_nodes: int, copies: int) -> None:
    names = [f"n{number}" for number in range(num_nodes) for _ in range(1 + number % 3)]
    plan = CopyPlan.of(names, copies=copies)
    assert plan.world_size == len(names)
    wanted = min(copies, num_nodes - 1)
    for node in range(num_nodes):
        keepers, kept = plan.keepers(node), plan.kept_by(node)
        assert len(set(keepers)) == len(keepers) == wanted == len(set(kept)) == len(kept)
        assert node not in keepers and node not in kept
        assert all(node in plan.kept_by(keeper) for keeper in keepers)


def test_ranks_of_a_node_need_not_follow_each_other() -> None:
    plan = CopyPlan.of(["a", "b", "a", "c", "b"], copies=1)
    assert plan.names == ("a", "b", "c") and plan.nodes == ((0, 2), (1, 4), (3,))
    assert [plan.node_of(rank) for rank in range(5)] == [0, 1, 0, 2, 1]
    assert plan.keepers(2) == (0,)


def test_after_any_loss_that_leaves_a_copy_every_node_gets_what_it_needs() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    for _ in range(60):
        names = [f"n{rng.randrange(5)}" for _ in range(rng.randint(2, 9))]
        plan = CopyPlan.of(names, copies=rng.randint(0, 3))
        nodes, world_size = range(len(plan.nodes)), plan.world_size
        held = {node: {copy_of(plan.nodes[node], world_size)} for node in nodes}
        for copy, source, target in plan_copies(plan, [next(iter(held[n])) for n in nodes]):
            assert copy.ranks == plan.nodes[source] and source != target
            held[target].add(copy)
        for count in range(len(nodes) + 1):
            for lost in combinations(nodes, count):
                left = {node: set() if node in lost else set(held[node]) for node in nodes}
                whole = newest_state(left, world_size=world_size)
                gone = any({n, *plan.keepers(n)} <= set(lost) for n in nodes)
                assert (whole is None) == gone, (seed, names, lost)
                if whole is None:
                    continue
                # The job goes on with its ranks on other nodes, perhaps fewer of them.
                placed = names if rng.random() < 0.5 else [f"m{rng.randrange(4)}" for _ in names]
                new = CopyPlan.of(placed, copies=plan.copies)
                there = {n: left.get(n, set()) for n in range(len(new.nodes))}
                if newest_state(there, world_size=world_size) is None:
                    continue  # what survived lies on nodes that are not used any more
                for copy, source, target in plan_restore(new, there):
                    assert copy in there[source] and copy not in there[target]
                    there[target].add(copy)
                for node in range(len(new.nodes)):
                    need = {r for n in (node, *new.kept_by(node)) for r in new.nodes[n]}
                    assert need <= {r for copy in there[node] for r in copy.ranks}, (seed, names)


def test_the_newest_state_is_of_one_save_and_of_this_job() -> None:
    half, other = copy_of((0,), 2, step=3, token="b"), copy_of((1,), 2, step=3, token="c")
    old = [copy_of((0,), 2, step=2), copy_of((1,), 2, step=2)]
    held = {0: [old[0], half], 1: [old[1], other]}
    assert newest_state(held, world_size=2) == (2, "a" * 16)  # step 3 was saved twice, by halves
    assert newest_state(held, world_size=2, at_least=3) is None
    assert newest_state(held, world_size=1) is None
    assert newest_state({0: [copy_of((0, 1), 2, step=9)]}, world_size=2) == (9, "a" * 16)
