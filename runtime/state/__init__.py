"""State between steps: variables, optimizers, gradients."""
