"""Records the work of passes: in a file per pass, in torch's trace, in the terminal."""
