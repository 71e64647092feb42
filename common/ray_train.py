"""The command `python -m common.ray_train`; what it does is in `common.checks.ray_train`."""

from common.checks.ray_train import main

if __name__ == "__main__":
    main()
