"""torch.fx and operator schemas."""
