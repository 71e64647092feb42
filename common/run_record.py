"""The command `python -m common.run_record`; what it does is in `bench.run_record`."""

from bench.run_record import main

if __name__ == "__main__":
    main()
