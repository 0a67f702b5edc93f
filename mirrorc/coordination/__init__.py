"""What the workers of a step agree on in each call: header, fingerprint, state sync, joins."""
