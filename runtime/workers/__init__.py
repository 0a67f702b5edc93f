"""What a step does together with the other workers: they meet before it, exchange sums in it, and agree at its end."""
