"""Two printed programs and what differs between them, in words; `mirrorc.comparison.diff` puts it together."""
