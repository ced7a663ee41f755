"""End-to-end training of Mixture-of-Experts language models.

    moe-train train examples/python_stdlib.toml

trains from the command line; from Python, `load_config` reads the same file.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "Batch": "data.packing",
    "Config": "config.tables",
    "MetricsLog": "report.metrics",
    "MoeTrainError": "errors",
    "PackedSplit": "data.packing",
    "PreparedCorpus": "data.prepare",
    "ProgressLine": "report.progress",
    "RankFailedError": "errors",
    "SampleOrder": "data.order",
    "StopFlag": "launch.signals",
    "describe_checkpoint": "jobs.inspect",
    "dump_toml": "config.toml_file",
    "generate_text": "jobs.generate",
    "load_config": "config.toml_file",
    "plan_report": "jobs.plan",
    "prepare": "data.prepare",
    "run_local": "launch.local",
    "unigram_cross_entropy": "data.unigram",
    "write_plots": "report.plots",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
