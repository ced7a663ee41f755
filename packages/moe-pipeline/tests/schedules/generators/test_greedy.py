from random import Random

from moe_pipeline.schedules.generators.greedy import Policy, Task, run_policy
from moe_pipeline.schedules.generators.rows import finish
from moe_pipeline.schedules.table.checker import check
from moe_pipeline.schedules.table.costs import StageCosts
from moe_pipeline.schedules.table.simulator import simulate


def test_any_policy_is_legal_within_the_cap_and_timed_as_simulated(seed):
    draw = Random(seed)
    finished = 0
    for _ in range(60):
        p, m = draw.randint(1, 4), draw.randint(1, 6)
        costs = [
            StageCosts(
                forward_s=draw.randint(1, 3),
                input_gradient_s=draw.randint(1, 3),
                weight_gradient_s=draw.randint(0, 3),
                forward_transfer_s=draw.randint(0, 1),
                backward_transfer_s=draw.randint(0, 1),
                activation_bytes=draw.randint(1, 4),
            )
            for _ in range(2 * p)
        ]
        least = max(costs[r].activation_bytes + costs[-1 - r].activation_bytes for r in range(p))
        cap = least + draw.randint(0, 8)
        task = Task(num_ranks=p, num_microbatches=m, costs=costs, memory_cap_bytes=cap)
        policy = Policy(
            forward_at=tuple(draw.randint(0, 40) for _ in range(2 * p)),
            gradient_at=tuple(draw.randint(0, 40) for _ in range(2 * p)),
            in_flight=tuple(draw.randint(1, 6) for _ in range(2 * p)),
            weight_delay=draw.choice((0, 6, 1000)),
        )
        found = run_policy(task, policy)
        assert found is not None
        schedule = finish("t", found.rows, m, num_stages=2 * p)
        assert check(schedule) == []
        result = simulate(schedule, costs)
        assert max(result.peak_bytes) <= cap
        bare = tuple(map(tuple, found.rows))
        timed = simulate(
            type(schedule)(name="t", num_stages=2 * p, num_microbatches=m, ranks=bare), costs
        )
        assert timed.makespan_s == found.makespan_s
        finished += 1
    assert finished == 60
