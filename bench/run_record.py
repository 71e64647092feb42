"""Keep the record of a run: `python -m common.run_record RESULTS_FOLDER` copies it where it is committed."""

from pathlib import Path

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import from_repository
from common.records.store import RECORD_NAME, fit_to_be_kept, load_record, write_json


def keep_record(results_folder: Path, records: Path | None = None) -> Path:
    """Copy a run's record, without paths of this machine, to `records`, or its run folder's own; return the file."""
    record = load_record(results_folder / RECORD_NAME)
    threads, folder = record["config"].get("threads", 1), results_folder.resolve()
    if threads > 1:
        raise BadInputError(f"{results_folder} had {threads} threads a device, kept records have one: repeat it so.")
    if folder.parent.name != "results":
        raise BadInputError(f"{results_folder} is no results folder: pass RUN=<run folder>/results/<name>.")
    kept = (records or folder.parents[1] / "records") / f"{record['run_name']}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if kept.exists():
        print(f"replaces the earlier {kept.name}")
    write_json(fit_to_be_kept(record), kept)
    return kept


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = OneSentenceParser(description="Keep the record of a run: copy it where it is committed.")
    parser.add_argument("results_folder", type=Path, help="<run folder>/results/<name>")
    kept = keep_record(parser.parse_args().results_folder)
    print(f"kept {from_repository(kept)}; `make tables` renders it")
