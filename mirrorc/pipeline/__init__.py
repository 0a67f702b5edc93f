"""What a pass is, the runner that applies passes, and pipelines as text."""
