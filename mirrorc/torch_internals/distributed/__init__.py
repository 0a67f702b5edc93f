"""Private gloo and NCCL groups."""
