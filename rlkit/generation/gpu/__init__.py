"""Decoding that stays on the GPU."""
