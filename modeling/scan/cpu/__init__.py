"""The scan as compiled code for processors."""
