"""Keep the record of a run: `python -m common.run_record RESULTS_FOLDER` copies it where it is committed."""

from pathlib import Path

from common.base.command_line import refused_in_one_sentence
from common.base.parsing import OneSentenceParser
from common.base.paths import from_repository
from common.records.store import keep_record


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = OneSentenceParser(description="Keep the record of a run: copy it where it is committed.")
    parser.add_argument("results_folder", type=Path, help="<run folder>/results/<name>")
    kept = keep_record(parser.parse_args().results_folder)
    print(f"kept {from_repository(kept)}; `make tables` renders it")


if __name__ == "__main__":
    main()
