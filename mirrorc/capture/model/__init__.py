"""The model as data: variables, fingerprint, what is refused."""
