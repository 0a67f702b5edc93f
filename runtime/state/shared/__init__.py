"""State that several steps hold, and its owner in a call."""
