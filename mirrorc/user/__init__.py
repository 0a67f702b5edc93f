"""The user's own objects: optimizers, aliased tensors, training-loop habits, restoring a model."""
