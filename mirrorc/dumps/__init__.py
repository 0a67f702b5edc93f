"""Records the work of passes: in files, in torch's trace, in the terminal."""
