"""Value numbering, for the comparison of programs."""
