"""The command `python -m common.dry_run`; what it does is in `common.checks.dry_run`."""

from common.checks.dry_run import main

if __name__ == "__main__":
    main()
