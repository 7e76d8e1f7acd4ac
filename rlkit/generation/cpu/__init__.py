"""Decoding on the CPU as one compiled function."""
