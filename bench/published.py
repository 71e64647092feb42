"""Memory and rates that others published, beside what the planner says of the same runs, for reports and the planner.

    python -m bench.published

writes assets/published_planned.json: anew whenever the planner's figures change.
"""

import json
from typing import Any

from bench import published_rates
from bench.published_memory import errors_by_source, excluded, held_out_points, points, verdicts_on
from common.planning.published_rates import PLANNED_PATH


def content() -> dict[str, list[Any]]:
    """Return the file's content: rows of tables."""
    return {
        "memory": errors_by_source(),
        "verdicts": [
            {"runs": "all sources", **verdicts_on(points())},
            {"runs": "held out", **verdicts_on(held_out_points())},
        ],
        "memory_not_planned": [{"reason": each["reason"], "points": each["points"]} for each in excluded()],
        "rates_not_used": published_rates.rates_not_used(),
        "rates": [published_rates.beside_planned(run) for run in published_rates.published_runs()],
    }


def main() -> None:
    """Write the file, with one row a line."""
    parts = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in content().items()]
    PLANNED_PATH.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
