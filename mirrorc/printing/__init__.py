"""The printed form of programs, and reading it back. A line is `graph_text._call_text` plus `line_comments`."""
