"""`python -m comm_collectives`: the same as the command `comm-collectives`."""

import sys

from comm_collectives.cli import main

if __name__ == "__main__":
    sys.exit(main())
