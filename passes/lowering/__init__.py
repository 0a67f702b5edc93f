"""SCHEDULED to LOWERED: links, and one graph per device."""
