"""Memory of variables, and detection of the user's writes."""
