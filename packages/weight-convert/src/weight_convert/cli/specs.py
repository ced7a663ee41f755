"""`weight-convert specs [NAME]`: list families and formats, print one, hold it against a directory.

weight-convert specs                      # family, formats, and whose code shows each
weight-convert specs mixtral > mine.toml  # the file to begin an own family with
weight-convert specs --check DIR          # what DIR has that its spec does not explain
"""

import argparse

from weight_convert.cli.arguments import add_family, family_given
from weight_convert.specs import family_names, get_spec, spec_text
from weight_convert.verification import explain

_SHOWN_KEYS = 20


def add_specs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("specs", help="list the families, or print or check one")
    parser.add_argument("name", nargs="?", metavar="NAME", help="family whose file to print")
    parser.add_argument(
        "--check", metavar="DIR", help="say what DIR has that its family's spec does not explain"
    )
    add_family(parser)
    parser.set_defaults(run=_run_specs)


def _run_specs(args: argparse.Namespace) -> int:
    if args.check is not None:
        return _check(args)
    if args.name is not None:
        print(spec_text(args.name), end="")
        return 0
    specs = [get_spec(name) for name in family_names()]
    width = max(len(name) for spec in specs for name in spec.formats)
    for spec in specs:
        for form in spec.formats.values():
            print(f"{spec.model_type:14} {form.name:{width}} {form.proof or 'experimental'}")
    return 0


def _check(args: argparse.Namespace) -> int:
    found = explain(args.check, spec=family_given(args))
    if found.problem:
        print(f"problem: {found.problem}")
    for what, lines in (("unknown", found.unknown), ("conflict", found.conflicts)):
        for line in lines[:_SHOWN_KEYS]:
            print(f"{what}: {line}")
        if len(lines) > _SHOWN_KEYS:
            print(f"... and {len(lines) - _SHOWN_KEYS:,} more {what}")
    print(
        f"{found.model_type}, format {found.format}: {found.num_named:,} tensors named, "
        f"{len(found.unknown):,} unknown, {len(found.conflicts):,} in conflict"
    )
    return 0 if found.is_whole else 1
