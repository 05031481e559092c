"""NVFP4 weights as bytes: their layout, their exact values, and products with them."""

from kernels_pallas.format import (
    BLOCK_SIZE,
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    pack_codes,
    unpack_codes,
)
from kernels_pallas.reference import dequantize_reference, local_scales, nvfp4_matmul_reference

__all__ = [
    "BLOCK_SIZE",
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "dequantize_reference",
    "local_scales",
    "nvfp4_matmul_reference",
    "pack_codes",
    "unpack_codes",
]
