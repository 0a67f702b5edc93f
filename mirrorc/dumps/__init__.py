"""Writes down what the passes did: to a file per pass, to torch's trace, to the terminal."""
