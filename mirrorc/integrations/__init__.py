"""Trainers that people have, with `mirrorc.data_parallel` for their model: one file each, which imports its trainer."""
