"""Models at work: loading, forwards, scoring, heads, optimizer steps."""
