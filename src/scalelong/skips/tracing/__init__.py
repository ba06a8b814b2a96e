"""Find the long skips of models not listed in `families` by tracing one forward pass."""
