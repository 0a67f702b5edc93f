"""The team of workers: exchanges of headers, control messages, failures."""
