"""The state that is kept from step to step: variables, optimizers, gradients."""
