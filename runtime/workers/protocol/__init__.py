"""Messages between workers."""
