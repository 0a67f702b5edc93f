"""The printed form of programs, and reading it back."""
