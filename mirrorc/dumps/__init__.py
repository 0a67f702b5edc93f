"""What the passes did, written down: a file per pass, torch's trace, the terminal."""
