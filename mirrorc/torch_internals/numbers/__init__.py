"""Python scalars as inputs of graphs."""
