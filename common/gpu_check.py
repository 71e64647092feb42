"""The command `python -m common.gpu_check`; what it does is in `common.checks.gpu_check`."""

from common.checks.gpu_check import main

if __name__ == "__main__":
    main()
