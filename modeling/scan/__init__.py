"""One scan, which all models here but IDS4 run: its definition and its implementations."""
