"""The interface of passes, the runner that applies them, and pipelines as text."""
