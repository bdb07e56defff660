"""The tasks of the paper as datasets."""
