"""State shared by several steps, and its owner in a call."""
