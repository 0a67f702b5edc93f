"""Integrations of `mirrorc.data_parallel` with trainers: one file each, which imports its trainer."""
