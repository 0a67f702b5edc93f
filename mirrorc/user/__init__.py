"""The user's own objects: optimizers, tensors, training loops, models."""
