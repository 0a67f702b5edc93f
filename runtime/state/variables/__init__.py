"""Memory of variables, and writes to them by the user."""
