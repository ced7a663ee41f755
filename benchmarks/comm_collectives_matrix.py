"""Every cell of the matrix and every deliberate mistake, on two and on four ranks of this machine.

What `comm-collectives check --wire` runs: cells with every dtype where calls are compared in shared
memory, with few over the wire, and the mistakes in both. A cell is bad if it did not end as it must
on every rank, or if one that is spoiled on purpose was not noticed.

    python benchmarks/comm_collectives_matrix.py
"""

import json
from collections import Counter

from comm_collectives.checking.matrix import Outcome, check_machine
from comm_collectives.checking.rank_side import HERE, WIRE


def main() -> None:
    """Run both, and print what ended badly, then the counts as JSON."""
    ran: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for num_ranks in (2, 4):
        for outcome in check_machine(num_ranks, places=(HERE, WIRE)).outcomes:
            kind = kind_of(outcome)
            ran[kind] += 1
            bad[kind] += not outcome.is_good
            if not outcome.is_good:
                said = f"{outcome.order.what}: {outcome.verdict}: {outcome.detail}"
                print(f"{num_ranks} ranks, {outcome.order.place}: {said}", flush=True)
    for kind in ("cells", "mistakes"):
        line = {"figure": f"matrix_{kind}_bad", "value": bad[kind], "unit": kind, "n": ran[kind]}
        print(json.dumps(line))


def kind_of(outcome: Outcome) -> str:
    return "mistakes" if isinstance(outcome.order.what, str) else "cells"


if __name__ == "__main__":
    main()
