"""State shared by several steps, and its owner during a call."""
