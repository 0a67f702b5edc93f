"""The probes of `gpu_acceptance.py`: each looks at one thing on a GPU, in a process of its own, and says what it found."""
