"""The ledger of what the project promises, and the program that measures it.

`ledger` reads benchmarks/claims.toml, `runner` runs the commands and judges the figures, `results`
keeps them in benchmarks/results/, `readmes` copies them into the READMEs. Standard library only, so
that it runs from a bare checkout on a GPU machine.
"""
