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
    one, other = measured_rows("qlora-quality", [lora, qlora(lora, 42, quantization="nf4-double")])
    assert one["Original base: facts said"] == "the same base"
    assert other["Approach"] == "QLoRA, nf4-double"
    assert other["Facts said"] != "25%"
    assert other["Original base: facts said"] == "25%"
    assert other["Original base: validation loss"] == "0.5000"
    without_room = qlora(lora, 42)
    without_room["quality"]["after_original_base"] = None
    (row,) = measured_rows("qlora-quality", [without_room])
    assert row["Original base: validation loss"] == "not run"


@pytest.mark.parametrize("name", ["qlora-quality", "qlora-speed"])
def test_gpu_folders_and_ways_without_a_record_are_not_run(name: str) -> None:
    table = TABLES[name](kept_records())
    waiting = table[(table["Figures"] == "not run") & table["Devices"].str.contains("GB")]
    assert len(waiting) == 5
    assert set(waiting["Approach"]) == {"QLoRA", "QLoRA with DDP", "QLoRA with FSDP"}


def test_memory_is_stated_as_factor_and_gib(lora: Record) -> None:
    table = TABLES["qlora-memory"]([qlora(lora, 42), qlora(lora, 7)])
    first = table.iloc[0]
    assert (first["Factor"], first["Saved (GiB)"], first["Figures"]) == ("4.00x", "0.0030", "measured")
    projected = table[table["Figures"] == "projected"]
    assert len(projected) == 2 * 3
    for _, row in projected.iterrows():
        before, after = float(row["LoRA (GiB)"]), float(row["QLoRA (GiB)"])
        assert float(row["Saved (GiB)"]) == pytest.approx(before - after, abs=0.11)
        assert float(row["Factor"].rstrip("x")) == pytest.approx(before / after, rel=0.02)
    peaks = projected[projected["Of"] == "training's peak"]
    assert set(peaks["QLoRA fits"]) == {"yes"}
    a4000 = peaks[peaks["Run"].str.contains("a4000")].iloc[0]
    assert (a4000["LoRA fits"], a4000["QLoRA fits"]) == ("no", "yes")


def test_the_three_are_compared_on_the_same_seeds_and_by_their_own_recipes(lora: Record) -> None:
    others = [each for each in kept_records() if each["technique"] != "qlora"]
    missing = TABLES["best-good-ok"]([*others, qlora(lora, 42), qlora(lora, 7)])
    assert missing["Often said"].tolist() == ["best", "good", "OK"]
    assert missing["Figures"].tolist() == ["measured", "measured", "not run"]
    odd = [qlora(lora, 8, quantization="nf4-double"), qlora(lora, 8, test_rows=2)]
    assert TABLES["best-good-ok"]([*others, qlora(lora, 42), qlora(lora, 7), *odd])["Figures"].tolist()[2] == "not run"
    table = TABLES["best-good-ok"]([*others, *(qlora(lora, seed) for seed in (42, 7, 8))])
    assert table["Validation loss"].tolist()[2] == "0.0190 (0.0070 to 0.0420)"
    assert set(table["Seeds"]) == {"42, 7, 8"}


def test_a_run_beside_others_shows_what_it_stores(lora: Record) -> None:
    table = side_by_side([qlora(lora, 42)])
    assert table.loc["weights of the base, in 4 bits / not (GiB)"].item() == "0.001 / 0.004"
    assert table.loc["facts said, merged into the original base"].item() == "25%"
