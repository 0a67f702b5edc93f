"""The user's own objects: optimizers, aliased tensors, training loops, restoring a model."""
