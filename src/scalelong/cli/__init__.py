"""The command line: one small file per verb that parses, calls and prints."""
