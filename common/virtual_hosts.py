"""The command `python -m common.virtual_hosts`; what it does is in `common.runtime.virtual_hosts`."""

from common.runtime.virtual_hosts import main

if __name__ == "__main__":
    main()
