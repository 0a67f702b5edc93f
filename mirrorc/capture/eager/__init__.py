"""Front end 2: forward and backward as plain PyTorch."""
