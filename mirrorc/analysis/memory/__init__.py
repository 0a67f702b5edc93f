"""Of activations: peaks, recomputation, segments."""
