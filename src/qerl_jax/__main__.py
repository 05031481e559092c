"""`python -m qerl_jax` is the command `qerl`."""

from qerl_jax.cli import run

if __name__ == "__main__":
    run()
