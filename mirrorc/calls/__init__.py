"""The calls of a step."""
