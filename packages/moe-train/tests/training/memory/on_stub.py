"""A rank's memory served by gpu-alloc under real torch, in a process on devicetest's stub of CUDA.

    python on_stub.py JOB_FILE

The rank is built; its products need cuBLAS, which is not there. Prints one JSON object of facts;
`test_rank_memory.py` says what they must be.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from gpu_alloc.torch import open_arena
from moe_pipeline.schedules.table import Action, Kind
from moe_train.config import Config, load_config
from moe_train.early_checks import allocator_settings
from moe_train.errors import RankOutOfMemoryError
from moe_train.parallel import start
from moe_train.training import build_runner, read_model_config
from moe_train.training.memory import RankMemory

MIB = 1 << 20
OVERRIDES = (
    "train.device=cuda",
    "memory.allocator=gpu-alloc",
    "memory.settings=large_pool_pre_alloc_in_mb:512",
    "memory.record=true",
)


def facts_of(config: Config) -> dict[str, object]:
    facts: dict[str, object] = {}
    try:
        with RankMemory.begin(config, torch.device("cuda", 0)) as memory:
            store = torch.distributed.FileStore(f"{config.log_folder}.store", 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            parallel = start(config)
            runner, _ = build_runner(config, read_model_config(config), parallel, {})
            memory.rank = 2
            held = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")  # in the slab
            weights = list(runner.stages.parameters())
            facts["weights_bytes"] = sum(p.numel() * p.element_size() for p in weights)
            core = open_arena(allocator_settings(config)).allocator(0)
            facts["requested_bytes"] = core.stats().requested_bytes - held.nbytes
            with (
                memory.step(4),
                memory.around(lambda action: nullcontext())(Action(0, Kind.FORWARD, 1)),
            ):
                torch.empty(900 * MIB, dtype=torch.uint8, device="cuda")
    except RankOutOfMemoryError as error:
        facts["told"] = str(error)
    return facts


if __name__ == "__main__":
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    print(json.dumps(facts_of(load_config(Path(sys.argv[1]), OVERRIDES))))
