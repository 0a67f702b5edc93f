"""The intermediate representation: what passes, verifier and runtime stand on."""
