"""What lives from step to step: variables, optimizers, gradients."""
