"""Value numbering, by which programs are compared."""
