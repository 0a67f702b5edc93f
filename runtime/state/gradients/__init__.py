"""Gradients kept between calls: accumulated, residual, sparse."""
