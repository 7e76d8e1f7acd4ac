"""The checks that rlkit is held to, each a file named after its number."""
