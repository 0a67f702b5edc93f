"""From a model and a batch to one captured graph of forward, loss and backward."""
