"""The scan, the mixer, the models and their heads."""
