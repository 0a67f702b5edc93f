"""Wording of errors and remarks: lists, counts, the user's source line."""
