"""The model as data: variables, fingerprint, refusals."""
