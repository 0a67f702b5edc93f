"""The user's own objects as a step finds them: optimizers, aliased tensors, training-loop habits, restoring a model."""
