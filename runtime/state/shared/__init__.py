"""State that several steps hold, and what they left unfinished."""
