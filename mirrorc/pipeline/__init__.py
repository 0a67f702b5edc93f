"""The interface of passes, their runner, and pipelines as text."""
