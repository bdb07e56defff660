"""`python -m mamba3_nplr.publish`: see `datasets_scripts/publish.py`."""

from .datasets_scripts.publish import main

if __name__ == "__main__":
    main()
