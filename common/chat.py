"""The command `python -m common.chat`; what it does is in `common.serving.chat`."""

from common.serving.chat import main

if __name__ == "__main__":
    main()
