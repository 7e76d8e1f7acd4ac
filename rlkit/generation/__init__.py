"""Sampling responses: the interface, the samplers and the native decoder."""
