"""`python -m qerl_jax` is the command `qerl`."""

import sys

from qerl_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
