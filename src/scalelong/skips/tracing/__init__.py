"""Finding the long skips of models that are not in the table of `families`, from one traced forward pass."""
