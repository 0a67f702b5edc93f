"""Random training runs: models, events between their steps, and the same runs in plain PyTorch."""
