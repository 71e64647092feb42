"""The measured tables of 3.2: loops with their scores, and what each exchange takes on each link."""

import copy

from common.base.run_config import RunConfig
from common.records.store import Record
from common.reporting.summarization import EXCHANGES, LOOPS, front, loops_table, network_table, results_text


def record(loop: str, train_time_s: float, **settings: object) -> Record:
    devices = settings.get("devices", 2)
    settings = {"parallel": "ddp" if devices > 1 else "single", "devices": devices, **settings}
    config = RunConfig(task="summarization", technique="full", loop=loop, run_folder="3.2_x/run_0", **settings)
    scores = dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum", "exact_share"), 0.5)
    return {
        "status": "completed", "technique": "full", "parallel": config.parallel, "run_folder": config.run_folder,
        "run_name": f"{loop}-{devices}", "launcher": "torchrun" if devices > 1 else "python", "command": "run",
        "config": config.to_dict(), "environment": {"devices": ["CPU"], "threads_per_rank": 1},
        "quality": {"before": scores, "after": {**scores, "rougeL": 0.9, "rows": 9}}, "train_time_s": train_time_s,
        "reporting_s": 1.0, "steps": 10, "effective_batch_size": 32, "best_validation_loss": 0.25,
        "tokens_per_s": 1000.0, "training_losses": [[10, 0.5]], "memory": [], "world": [],
    }  # fmt: skip


def test_loops_stand_in_order_after_one_device() -> None:
    runs = [record("trainer", 40.0, devices=1, partitions=2), record("machines", 25.0), record("trainer", 20.0)]
    table = loops_table(runs)
    columns = ["Loop", "Training time", "To the letter", "ROUGE-L before -> after"]
    assert table.query("Figures == 'measured'")[columns].values.tolist() == [
        [LOOPS["trainer"], "0:40", "50% -> 50%", "0.500 -> 0.900"],
        [LOOPS["trainer"], "0:20", "50% -> 50%", "0.500 -> 0.900"],
        [LOOPS["machines"], "0:25", "50% -> 50%", "0.500 -> 0.900"],
    ]
    assert len(front(runs)) == 3
    lines = [line for line in results_text(runs).splitlines() if line.startswith(LOOPS["trainer"])]
    assert len(lines) % 2 == 0  # two in each part of the table
    assert any("0:40" in line for line in lines)


def test_seeds_stand_in_one_line_with_their_range() -> None:
    runs = [record("trainer", 20.0), record("trainer", 30.0, seed=43)]
    runs[1]["quality"] = copy.deepcopy(runs[1]["quality"])
    runs[1]["quality"]["after"]["rougeL"] = 0.8
    measured = loops_table(runs).query("Figures == 'measured'")[["Seeds", "ROUGE-L before -> after"]]
    assert measured.values.tolist() == [["2", "0.500 -> 0.850 (0.800 to 0.900)"]]


def test_exchanges_are_compared_on_the_same_link() -> None:
    runs = [
        record("machines", seconds, nodes=2, link=where, gradient_exchange=exchange)
        for where, factor in (("100 Mbit/s", 2), ("not limited", 1))
        for exchange, seconds in zip(EXCHANGES, (1 + 5.0 * factor, 1 + 4.0 * factor, 1 + 2.5 * factor), strict=True)
    ]
    table = network_table(runs)[["Link", "Gradients are sent", "Faster than after the backward pass"]]
    factors = list(zip(EXCHANGES.values(), ("1.00x", "1.25x", "2.00x"), strict=True))
    assert sorted(table.itertuples(index=False, name=None)) == sorted(
        (link, *each) for link in ("100 Mbit/s", "not limited") for each in factors
    )
    assert not (loops_table(runs)["Figures"] == "measured").any()
