"""Torch.fx and operator schemas."""
