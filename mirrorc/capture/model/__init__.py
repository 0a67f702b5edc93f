"""The model as data: variables, fingerprint, refused models."""
