"""Configurations of the models."""
