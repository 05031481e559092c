"""A train/eval split of generated questions that no seed can mix."""

import hashlib

from qerl_jax.data.examples import Part

EVAL_ONE_IN = 5  # this share of all problems is held out


def part_of(problem: str) -> Part:
    """Return the part that a problem belongs to, from a hash of its text alone.

    The same problem is in the same part for every seed, size and machine, so what is drawn for
    "eval" is never drawn for "train".
    """
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % EVAL_ONE_IN == 0 else "train"
