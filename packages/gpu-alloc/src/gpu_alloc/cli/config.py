"""The command `gpu-alloc config`: the settings in force, and where each comes from.

Invariant: the last line, given as the environment variable, brings the same settings back.
"""

import argparse
import json
from dataclasses import asdict, fields

from gpu_alloc.cli.options import Commands, add_conf, effective_config
from gpu_alloc.core import ENV_VARIABLE, AllocatorConfig


def add_config(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("config", help="print the effective configuration")
    add_conf(parser)
    parser.set_defaults(run=_run_config)


def _run_config(arguments: argparse.Namespace) -> int:
    config = effective_config(arguments)
    if arguments.json:
        print(json.dumps(asdict(config)))
        return 0
    environment = AllocatorConfig.from_env()
    defaults = AllocatorConfig()
    for field in fields(config):
        value, default = getattr(config, field.name), getattr(defaults, field.name)
        in_environment = getattr(environment, field.name)
        origin = "--conf" if value != in_environment else ENV_VARIABLE
        origin = "default" if value == default else origin
        print(f"{field.name:<42} {str(value).lower():<8} {origin}")
    print(f"\n{ENV_VARIABLE}={config.format()}")
    return 0
