"""The command `python -m common.export`; what it does is in `common.serving.export`."""

from common.serving.export import main

if __name__ == "__main__":
    main()
