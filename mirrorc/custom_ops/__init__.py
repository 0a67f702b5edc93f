# ruff: noqa: F401
"""Operators that mirrorc registers with torch. Importing this package registers them."""

from mirrorc.custom_ops import eager_calls, out_products, output_tangents, random, recurrent, replica_collectives
