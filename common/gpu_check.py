"""The command `python -m common.gpu_check`; what it does is in `bench.gpu_check`."""

from bench.gpu_check import main

if __name__ == "__main__":
    main()
