"""The user's objects: optimizers, tensors, training loops, models."""
