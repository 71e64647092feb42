"""The command `python -m common.compare`; what it does is in `common.reporting.compare`."""

from common.reporting.compare import main

if __name__ == "__main__":
    main()
