"""The command `python -m common.compare`; what it does is in `bench.compare`."""

from bench.compare import main

if __name__ == "__main__":
    main()
