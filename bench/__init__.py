"""What only this repository needs: `make bench`, a rented GPU's minutes, and the tables of its pages."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the embedded base and data need no network
