"""The team of workers: meetings, control messages, failures."""
