"""The command `python -m common.preflight`; what it does is in `common.checks.preflight`."""

from common.checks.preflight import main

if __name__ == "__main__":
    main()
