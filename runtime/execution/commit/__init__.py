"""The moment of commit: meeting, finiteness, what is deferred behind it."""
