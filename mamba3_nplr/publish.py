"""`python -m mamba3_nplr.publish`: see `training/publish.py`."""

from .training.publish import main

if __name__ == "__main__":
    main()
