"""The agreement of the workers of a step in each call."""
