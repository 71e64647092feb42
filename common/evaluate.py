"""Score a run's base and its tuned model on standard tasks, by EleutherAI's lm-evaluation-harness.

python -m common.evaluate 2.1_lora_finetuning/run_0_cpu_x1/results/RUN --tasks arc_easy hellaswag --limit 200
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError, check_installed, first_sentence
from common.base.parsing import OneSentenceParser
from common.records.store import write_json
from common.reporting.layout import fitted
from common.serving.tuned_runs import TunedRun, find_run, load_models

SCORES_NAME = "scores.json"
Scores = Mapping[str, Mapping[str, Any]]  # by task: each metric, as `acc,none`, and its standard error


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what a command line asks for; options are called as the harness calls them."""
    parser = OneSentenceParser(prog="python -m common.evaluate", description=__doc__)
    parser.add_argument("run", help="results folder of a run, or its name")
    parser.add_argument("--base", default="", help="where the base model is now, if it has moved")
    parser.add_argument("--tasks", nargs="+", required=True, help="names of tasks; `python -m lm_eval ls tasks`")
    parser.add_argument("--include_path", help="a folder with tasks of your own, as the harness's YAML files")
    parser.add_argument("--limit", type=int, help="questions of each task; without it: all")
    parser.add_argument("--num_fewshot", type=int, help="examples in a prompt; without it: each task's own number")
    parser.add_argument("--batch_size", type=int, default=8, help="questions at once")
    parser.add_argument("--apply_chat_template", action="store_true", help="ask in the model's chat template")
    return parser.parse_args(arguments)


def tasks_of(options: argparse.Namespace) -> Any:
    """Return the harness's `TaskManager`, once it has read the rows of all tasks.

    Raises:
        BadInputError: the harness has no such task, or its rows cannot be read.
    """
    from lm_eval.tasks import TaskManager  # here: it is an extra

    manager = TaskManager(include_path=options.include_path)
    for task in options.tasks:
        if task not in manager.all_tasks:
            raise BadInputError(
                f"tasks has {task!r}, which the harness does not know: `python -m lm_eval ls tasks` lists all, and "
                "--include_path takes a folder with your own."
            )
    try:
        manager.load(options.tasks)
    except Exception as error:  # of `datasets`, of the Hub, or of a task's own code
        names = ", ".join(options.tasks)
        raise BadInputError(
            f"The rows of {names} cannot be read ({first_sentence(error)}): tasks of the Hub need a network once."
        ) from error
    return manager


def scores_of(run: TunedRun, options: argparse.Namespace, manager: Any) -> dict[str, Scores]:
    """Return what the harness finds of the base and of the tuned model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    models, found = load_models(run), {}
    for name, model, entered in (
        ("base", models.base, models.without_adapter), ("tuned", models.tuned, nullcontext),
    ):  # fmt: skip
        print(f"-- {name}", flush=True)
        with entered():
            answering = HFLM(pretrained=model, tokenizer=models.tokenizer, batch_size=options.batch_size)
            found[name] = simple_evaluate(
                answering, tasks=options.tasks, task_manager=manager, limit=options.limit,
                num_fewshot=options.num_fewshot, apply_chat_template=options.apply_chat_template, log_samples=False,
            )["results"]  # fmt: skip
    return found


def table_of(found: Mapping[str, Scores]) -> str:
    """Return base and tuned model beside each other, a line for each metric, with standard errors."""
    return fitted(["task", "metric", "base", "tuned"], list(_lines(found["base"], found["tuned"])))


def _lines(base: Scores, tuned: Scores) -> Iterator[list[str]]:
    for task, metrics in base.items():
        for metric, value in metrics.items():
            name, _, how = metric.partition(",")
            if isinstance(value, float) and not name.endswith("_stderr"):
                error = f"{name}_stderr,{how}"
                yield [task, name, *(_said(each[task][metric], each[task].get(error)) for each in (base, tuned))]


def _said(value: float, error: float | str | None) -> str:
    return f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else "")


@refused_in_one_sentence()
def main() -> None:
    """Score both models, print the table, and keep the scores beside the run's record."""
    options = options_of()
    check_installed("lm_eval", "common.evaluate", "`pip install -e '.[evaluation]'` in the repository's folder")
    run = find_run(options.run, options.base)
    found = scores_of(run, options, tasks_of(options))
    asked = {name: getattr(options, name) for name in ("tasks", "limit", "num_fewshot", "apply_chat_template")}
    write_json({**asked, **found}, run.folder / SCORES_NAME)
    print(f"\n{table_of(found)}\n\nscores: {SCORES_NAME} beside the run's record")


if __name__ == "__main__":
    main()
