"""The scaling methods."""
