"""The tables of 3.3 say what its records say, and call what nobody ran `not run`."""

import copy

import pytest

from common.base.paths import REPOSITORY
from common.base.run_folders import literal_of
from common.records.store import Record, kept_records
from common.reporting.page_runs import values_of
from common.reporting.pictures import AFTER, BEFORE, COMMONEST, SWAPPED, kinds_table, results_text, settings_table
from common.reporting.rows import LORA, completed
from common.reporting.tables import TABLES

FOLDER = "3.3_visual_question_answering/run_0_cpu_x1"


def found(share: float) -> dict[str, object]:
    return {
        "facts_said_share": share,
        "commonest_facts_said_share": 0.2,
        "swapped_facts_said_share": 0.05,
        "facts_said_share_by_kind": {"colour": share, "shape": 0.5},
    }


def seeing(lora: Record, parallel: str, seed: int, after: float, train_time_s: float) -> Record:
    ranks = 2 if parallel == "ddp" else 1
    config = literal_of(REPOSITORY / FOLDER).changed_to(
        technique="full", parallel=parallel, devices=ranks, per_device_train_batch_size=16 // ranks, seed=seed
    )
    return copy.deepcopy(lora) | {
        "technique": "full",
        "parallel": parallel,
        "run_folder": FOLDER,
        "run_name": f"full-{parallel}-{seed}",
        "launcher": "python" if parallel == "single" else "torchrun",
        "config": config.to_dict(),
        "effective_batch_size": 16,
        "train_time_s": train_time_s,
        "quality": {"before": found(0.3), "after": found(after)},
        "gallery": [{"picture": "data:image/png;base64,AA", "question": "What?", "is_hit": True}],
    }


@pytest.fixture
def records() -> list[Record]:
    lora = next(each for each in completed(kept_records(), LORA) if each["launcher"] == "python")
    return [
        lora,
        seeing(lora, "ddp", 42, 0.92, 50.0),
        seeing(lora, "single", 43, 0.94, 90.0),
        seeing(lora, "single", 42, 0.9, 100.0),
    ]


def test_shares_are_means_over_seeds_and_the_folders_for_gpus_are_not_run(records: list[Record]) -> None:
    table = settings_table(records).set_index("Setting")
    one = table.query("Figures == 'measured'").loc["Full fine-tuning"]
    assert one[[BEFORE, COMMONEST, AFTER, SWAPPED, "Seeds"]].tolist() == [
        "30.0 (30.0 to 30.0)",
        "20.0 (20.0 to 20.0)",
        "92.0 (90.0 to 94.0)",
        "5.0 (5.0 to 5.0)",
        "2",
    ]
    assert table.loc["Full fine-tuning with DDP"].iloc[0]["Speed-up"] == "2.00x"
    assert table.query("Figures == 'not run'")["Devices"].tolist() == ["RTX A6000 48GB x1", "RTX A6000 48GB x2"]


def test_kinds_stand_before_and_after_and_the_terminal_has_a_line_for_each_setting(records: list[Record]) -> None:
    rows = kinds_table(records).set_index("Setting")
    assert rows.loc["Full fine-tuning", ["colour", "shape"]].tolist() == ["30 / 92", "50 / 50"]
    assert "Full fine-tuning with DDP" in results_text(records)
    assert results_text([]) == "no run about pictures is completed yet"


def test_other_tables_leave_them_alone(records: list[Record]) -> None:
    for name in ("lora-quality", "full-quality", "classification-settings"):
        assert TABLES[name](records).equals(TABLES[name](records[:1]))


def test_the_page_has_the_gallery(records: list[Record]) -> None:
    of_chat, of_pictures = map(values_of, records[:2])
    assert (of_pictures["gallery"], of_pictures["quality"]) == (records[1]["gallery"], 0.92)
    assert of_chat["gallery"] == []
