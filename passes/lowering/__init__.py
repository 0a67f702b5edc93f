"""Links, and one graph per device."""
