"""Checkpoints and other files: whole or absent, checked when they arrive, with their code, and with clear errors."""
