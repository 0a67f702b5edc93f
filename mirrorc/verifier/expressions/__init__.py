"""Value numbering, to compare programs."""
