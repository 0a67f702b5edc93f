"""Front end 1: Dynamo and joint export, with what is traced in place of torch's functions."""
