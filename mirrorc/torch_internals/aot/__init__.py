"""AOTAutograd: the joint graph and its clean-up."""
