"""QLoRA's tables say what its records say, and call what nobody ran `not run`."""

import copy

import pytest

from common.base.paths import REPOSITORY
from common.base.run_folders import literal_of
from common.records.store import Record, kept_records
from common.reporting.rows import LORA, completed
from common.reporting.tables import TABLES, side_by_side

FOLDER = "2.3_qlora_finetuning/run_0_cpu_x1"
STORED = {
    "stored_dtype": "uint8",
    "quantized_weights": 800,
    "quantized_bytes": 450,
    "bits_per_quantized_weight": 4.5,
    "other_weights": 200,
    "other_bytes": 800,
    "unquantized_gib": 0.004,
    "quantized_share": 0.8,
    "weights_gib": 0.001,
    "relative_error": 0.09,
}


@pytest.fixture
def lora() -> Record:
    return next(each for each in completed(kept_records(), LORA) if each["launcher"] == "python")


def qlora(lora: Record, seed: int, **settings: object) -> Record:
    """A QLoRA record made of a LoRA one."""
    record = copy.deepcopy(lora)
    record |= {"technique": "qlora", "run_folder": FOLDER, "quantization": STORED, "judged_by": "original base"}
    record["config"] = {**literal_of(REPOSITORY / FOLDER).to_dict(), "seed": seed, **settings}
    record["best_validation_loss"] = seed / 1000
    record["merged_validation_losses"] = {"merged": seed / 1000, "merged_into_original": 0.5}
    record["quality"]["after_original_base"] = {**record["quality"]["after"], "facts_said_share": 0.25}
    return record


def measured_rows(name: str, records: list[Record]) -> list[dict]:
    table = TABLES[name](records)
    return table[table["Figures"] == "measured"].to_dict("records")


def test_both_merges_stand_side_by_side(lora: Record) -> None:
    without_room = qlora(lora, 42)
    without_room["quality"]["after_original_base"] = None
    records = [lora, qlora(lora, 42, quantization="nf4-double"), without_room]
    one, other, alone = measured_rows("qlora-quality", records)
    columns = ("Approach", "Original base: facts said", "Original base: validation loss")
    assert [other[column] for column in columns] == ["QLoRA, nf4-double", "25%", "0.5000"]
    assert other["Facts said"] != "25%"
    assert one["Original base: facts said"] == "the same base"
    assert alone["Original base: validation loss"] == "not run"


def test_memory_is_stated_as_factor_and_gib(lora: Record) -> None:
    table = TABLES["qlora-memory"]([qlora(lora, 42), qlora(lora, 7)])
    assert table.iloc[0][["Factor", "Saved (GiB)", "Figures"]].tolist() == ["4.00x", "0.0030", "measured"]
    projected = table[table["Figures"] == "projected"]
    assert len(projected) == 2 * 3
    for _, row in projected.iterrows():
        before, after = float(row["LoRA (GiB)"]), float(row["QLoRA (GiB)"])
        assert float(row["Saved (GiB)"]) == pytest.approx(before - after, abs=0.11)
        assert float(row["Factor"].rstrip("x")) == pytest.approx(before / after, rel=0.02)


def test_the_three_are_compared_on_the_same_seeds_and_by_their_own_recipes(lora: Record) -> None:
    others = [each for each in kept_records() if each["technique"] != "qlora"]
    others += [qlora(lora, 42), qlora(lora, 7), qlora(lora, 8, quantization="nf4-double"), qlora(lora, 8, test_rows=2)]
    assert TABLES["best-good-ok"](others)["Figures"].tolist() == ["measured", "measured", "not run"]
    table = TABLES["best-good-ok"]([*others, qlora(lora, 8)])
    assert table["Often said"].tolist() == ["best", "good", "OK"]
    assert table["Validation loss"].tolist()[2] == "0.0190 (0.0070 to 0.0420)"
    assert set(table["Seeds"]) == {"42, 7, 8"}


def test_a_run_beside_others_shows_what_it_stores(lora: Record) -> None:
    table = side_by_side([qlora(lora, 42)])
    assert table.loc["weights of the base, in 4 bits / not (GiB)"].item() == "0.001 / 0.004"
    assert table.loc["facts said, merged into the original base"].item() == "25%"
