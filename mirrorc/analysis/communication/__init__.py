"""Of what workers exchange."""
