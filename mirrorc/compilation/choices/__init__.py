"""What is chosen by measurement or by all workers: bucket sizes, exchange, gradient order."""
