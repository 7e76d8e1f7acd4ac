"""rlkit beside other libraries that compute the same thing."""
