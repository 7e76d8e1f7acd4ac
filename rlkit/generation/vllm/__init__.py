"""Sampling with vLLM. Beside `generator`, these files are all that knows of it."""
