"""Settings that were tuned on one run of a program, in another run that the tuner has not seen.

    python benchmarks/gpu_alloc_unseen.py [--steps 3]

Of each of the decoders of gpu_alloc_decoder_traces two runs are recorded: lengths of sequences and
the choices of experts are drawn anew. Settings are tuned on the first one, as the tuner does by
default and without virtual memory; measured is the smallest device on which the second one runs
with these settings, slabs as large as they were found included, over its own peak of live bytes.
"""

import argparse
import random

from gpu_alloc_decoder_traces import RECIPES, decoder_trace
from gpu_alloc_fragmentation import report

from gpu_alloc import minimal_capacity, replay
from gpu_alloc.trace import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    seed = random.SystemRandom().randrange(1 << 30)
    found: dict[bool, list[float]] = {False: [], True: []}
    for number, (name, recipe) in enumerate(RECIPES.items()):
        first = decoder_trace(recipe, seed=seed + number, steps=steps)
        other = decoder_trace(recipe, seed=seed + 1000 + number, steps=steps)
        for has_pages, ratios in found.items():
            tuned = tune(first) if has_pages else tune(first, virtual_memory=False)
            live = replay(other, tuned.config).peak_live_bytes
            ratios.append(minimal_capacity(other, tuned.config) / live)
            print(
                f"{name}, seed {seed + number}: {tuned.name}, {tuned.ratio:.3f} where it was "
                f"tuned, {ratios[-1]:.3f} in the other run",
                flush=True,
            )
    report("gpu_alloc_tuned_elsewhere", found[False])
    report("gpu_alloc_tuned_with_pages_elsewhere", found[True])


if __name__ == "__main__":
    main()
