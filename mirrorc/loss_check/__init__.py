"""Whether a step on several devices means what one on the whole batch means, for a model, a loss and a batch."""
