"""Find the long skips of a model we do not know, from one forward pass."""
