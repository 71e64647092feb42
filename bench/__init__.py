"""What `make bench` measures: training against what users would pick instead, DDP's scaling, and evaluation."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the embedded base and data need no network
