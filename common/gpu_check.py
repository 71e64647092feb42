"""The command `python -m common.gpu_check`; what it does is in `bench.gpu_check`."""

from common.base.command_line import refused_in_one_sentence
from common.base.errors import importing_bench


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    with importing_bench("GPUs are checked in a clone of the repository: `python -m common.preflight` tries one run."):
        from bench import gpu_check
    gpu_check.main()


if __name__ == "__main__":
    main()
