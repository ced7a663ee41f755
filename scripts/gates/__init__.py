"""What every source file of this repository is held to, beyond ruff, mypy and import-linter.

Each gate is a pure function from parsed sources (or file contents) to a list of `Problem`s, so that
a test can hand it a bad sample and see it fail. `scripts/run_gates.py` runs them all.
"""
