"""Messages between workers: header, vote, checksums, counts, stage of a call."""
