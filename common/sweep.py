"""The command `python -m common.sweep`; what it does is in `bench.sweep`."""

from bench.sweep import main

if __name__ == "__main__":
    main()
