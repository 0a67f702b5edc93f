"""The intermediate representation, which passes, verifier and runtime share."""
