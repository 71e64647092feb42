"""Standard tasks: base and tuned model are scored by the harness on a task of one's own, without a network."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from common.base.errors import BadInputError
from common.evaluate import options_of, scores_of, table_of, tasks_of
from common.serving.tuned_runs import find_run
from tests.fixtures import Finished

TASK = """task: materials
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{answer}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Namespace]:
    rows = tmp_path / "rows.jsonl"
    questions = [
        {"question": f"The bowl {number} is made of", "answer": ("oak", "tin")[number % 2]} for number in range(6)
    ]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in questions))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "materials.yaml").write_text(TASK.format(rows=rows))

    def options(*arguments: str) -> Namespace:
        return options_of([*arguments, "--include_path", str(tmp_path / "tasks"), "--batch_size", "2"])

    return options


def test_base_and_tuned_model_are_scored_on_the_same_questions(
    asked: Callable[..., Namespace], run_workflow: Callable[..., Finished]
) -> None:
    run = run_workflow("python", "--learning_rate", "1e-3")
    options = asked(str(run.results), "--tasks", "materials")
    found = scores_of(find_run(str(run.results)), options, tasks_of(options))
    base, tuned = (found[name]["materials"]["perplexity,none"] for name in ("base", "tuned"))
    assert base > 1
    assert abs(tuned / base - 1) > 0.01, "the adapter is off for the base, and on for the tuned model"
    assert [words in table_of(found) for words in ("materials", f"{base:.4f}", f"{tuned:.4f}")] == [True] * 3


def test_a_task_that_is_not_there_or_cannot_be_read_is_refused(asked: Callable[..., Namespace], tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="'materals', which the harness does not know"):
        tasks_of(asked("run", "--tasks", "materals"))
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(BadInputError, match="cannot be read"):
        tasks_of(asked("run", "--tasks", "materials"))
