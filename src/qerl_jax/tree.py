"""Names, selection and sizes of the leaves of a parameter tree.

Two views of one tree. A *weight* is what a model has ("layers/q_proj/weight"), an array or a
container such as NvFp4Tensor; an *array* is what memory holds ("layers/q_proj/weight/packed").
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, UInt32

from qerl_jax.protocols import Params


def flatten_weights(params: Params) -> dict[str, Any]:
    """Return {"layers/q_proj/weight": weight}; a container counts as one weight."""
    return traverse_util.flatten_dict(params, sep="/")


def unflatten_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the nested dicts; inverse of `flatten_weights`."""
    return traverse_util.unflatten_dict(dict(weights), sep="/")


def flatten_arrays(tree: Any) -> dict[str, Any]:
    """Return {"layers/q_proj/weight/packed": array} of any pytree, containers opened."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def matches(name: str, pattern: str) -> bool:
    """Tell whether a name fits a pattern; `*`, `?` and `[...]` stay within one segment."""
    segments, wanted = name.split("/"), pattern.split("/")
    return len(segments) == len(wanted) and all(map(fnmatchcase, segments, wanted))


def select(params: Params, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the weights that fit any pattern, in tree order.

    Raises:
        ValueError: a pattern fits no weight, so that a misspelt one cannot pass unseen.
    """
    names = tuple(flatten_weights(params))
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(f"{pattern}: fits none of the {len(names)} weights, {_some(names)}")
    return tuple(name for name in names if any(matches(name, p) for p in patterns))


def num_elements(tree: Any) -> int:
    """Count array elements; abstract leaves count too. Two packed codes are one element."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    """Sum the bytes that the arrays take in memory; abstract leaves count too."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def fingerprint(tree: Any) -> str:
    """Name the arrays of a tree by a hash of their names, shapes and bits, the same on any device.

    Of the bits, it hashes a sum of 32-bit hashes of each number and its place: it is to notice
    other weights, not to withstand one who wants it not to.
    """
    parts = [
        f"{name} {array.dtype} {list(array.shape)} {int(_sum_of_hashes(array))}"
        for name, array in flatten_arrays(tree).items()
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@jax.jit
def _sum_of_hashes(array: Array) -> UInt32[Array, ""]:
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    hashed = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    for axis in range(array.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        hashed = _mix(hashed ^ (place * jnp.uint32(0x9E3779B9)))
    return jnp.sum(_mix(hashed), dtype=jnp.uint32)


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Let every bit change every other; the last step of MurmurHash3, a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _some(names: Sequence[str], *, limit: int = 5) -> str:
    listed = ", ".join(names[:limit])
    return f"{listed}, ..." if len(names) > limit else listed
