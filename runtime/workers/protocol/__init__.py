"""The messages: header, vote, checksums, counts, stage of a call."""
