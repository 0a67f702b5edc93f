"""Compares a step on several devices with one on the whole batch, for a model, a loss and a batch."""
