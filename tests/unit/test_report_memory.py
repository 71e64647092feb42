"""Plans beside what was measured, by phase, from kept records."""

from bench.tables.outcomes import TABLES


def record(name: str, planned: dict[str, float], measured: dict[str, float]) -> dict:
    entry = {"rank": 0, "planned_gib_by_phase": planned, "peak_gib_by_phase": measured}
    return {"run_folder": "2.1_lora_finetuning/run_0_cpu_x1", "run_name": name, "memory": [entry]}


def test_each_phase_is_compared_where_both_figures_are_there() -> None:
    phases = {"training": 1.1, "validation": 0.5, "merging": 2.0}
    records = [
        record("a", phases, {"training": 1.0, "validation": 0.5}),
        record("b", phases, {"training": 1.0, "final evaluation": 3.0}),
        {"run_folder": "2.1_x/run_0", "run_name": "old", "memory": [{"rank": 0, "planned_gib": 1.0}]},
    ]
    lines = TABLES["memory-by-phase"](records).set_index("Phase")
    assert lines["Compared"].to_dict() == {"training": 2, "validation": 1, "all phases": 3, "bar": ""}
    assert (lines.loc["training", "Mean error"], lines.loc["validation", "Worst error"]) == ("10.0%", "+0.0%")
    assert lines.loc["all phases", "Worst in"] == "2.1, a, rank 0"
    assert list(TABLES["memory-by-phase"]([])["Mean error"]) == ["not run", "≤ 3%"]
