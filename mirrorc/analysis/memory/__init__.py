"""Memory of activations: peaks, recomputation, segments."""
