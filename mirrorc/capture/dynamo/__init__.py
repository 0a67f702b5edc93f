"""Front end 1: Dynamo and joint export, with substitutes for torch's functions."""
