"""Each of the three ways to write the loop counts every test row once, and saves a model that plain libraries load.

That they come to what one device comes to is in test_equivalence.py.
"""

import csv
from collections.abc import Callable

import pytest
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.fixtures import Trained
from tests.recipes.folders import SUMMARIZATION

pytestmark = pytest.mark.slow
WAYS = ("torchrun", "accelerate", "machines")
QUICK = ("--train_rows", "65", "--validation_rows", "9", "--test_rows", "9", "--report_to", "none",
         "--max_new_tokens", "12", "--num_beams", "2", "--max_steps", "5", "--eval_steps", "0.2")  # fmt: skip
ACCUMULATED = ("--optimizer", "sgd", "--learning_rate", "0.05", "--batch_size", "4",
               "--gradient_accumulation_steps", "2", "--bucket_cap_mb", "0.05")  # fmt: skip
EXCHANGES = ("after", "overlapped-bf16")
Runs = dict[str, Trained]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs], tiny_summarizer: str) -> Runs:
    settings = {way: (way, ("--batch_size", "8")) for way in WAYS}
    for exchange in EXCHANGES:
        settings[exchange] = ("machines", (*ACCUMULATED, "--gradient_exchange", exchange))
    runs = {
        name: (SUMMARIZATION / f"my_workflow_summarization_{way}.py", (*QUICK, "--model", tiny_summarizer, *own))
        for name, (way, own) in settings.items()
    }
    return run_several(tmp_path_factory.mktemp("two"), runs, 2)


def test_gradients_sent_as_bf16_are_near(two_ranks: Runs) -> None:
    exact, rounded = (two_ranks[exchange].losses("training_losses") for exchange in EXCHANGES)
    assert rounded == pytest.approx(exact, rel=1e-3)
    assert rounded[1:] != exact[1:]


@pytest.mark.parametrize("way", WAYS)
def test_each_row_counts_once_in_rouge_and_plain_transformers_loads_the_result(two_ranks: Runs, way: str) -> None:
    results, after = two_ranks[way].results, two_ranks[way].record["quality"]["after"]
    with (results / "predictions_after.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["row"]) for row in rows] == list(range(1, 10))
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = [scorer.score(row["summary"], row["written"]) for row in rows]
    assert after["rows"] == 9
    for name in scorer.rouge_types:
        assert after[name] == pytest.approx(sum(score[name].fmeasure for score in scores) / 9)
    model, about = AutoModelForSeq2SeqLM.from_pretrained(results / "model", output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(results / "model").eos_token_id == model.config.eos_token_id
