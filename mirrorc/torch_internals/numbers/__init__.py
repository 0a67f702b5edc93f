"""Python scalars as graph inputs."""
