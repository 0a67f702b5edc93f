"""The agreement of the workers of a step in each call: header, fingerprint, state sync, joins."""
