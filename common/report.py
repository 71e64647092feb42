"""The command `python -m common.report`; what it does is in `bench.report`."""

from bench.report import main

if __name__ == "__main__":
    main()
