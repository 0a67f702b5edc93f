"""Two printed programs and what differs between them, in words; `mirrorc.diff` puts it together."""
