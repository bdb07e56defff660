"""What mixes tokens in a block: the Mamba-3 mixer, those of the delta family, and that of IDS4."""
