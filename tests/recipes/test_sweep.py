"""A sweep takes fewer steps than its grid, continues where it was interrupted, and refuses what cannot be, early."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench import sweep as sweeping
from bench.sweep import PICTURE, STATE, WEIGHTS, Sweep, Trial, groups_of_gpus, main, sweep_of
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import folder_named
from common.checks.folder_runs import run_of_folder
from common.records.store import REAL, RECORD_NAME, load_record
from tests.forked import run_forked

PYTHON = sys.executable
# stands in for Python: prints the losses of a run, whose rate and steps are among its arguments, or does what is asked
RUN = """#!{python}
import json, os, signal, sys
from pathlib import Path
option = lambda name: sys.argv[len(sys.argv) - 1 - sys.argv[::-1].index(name) + 1]
rate, steps = float(option("--learning_rate")), int(option("--max_steps"))
results = Path(option("--results_root")) / "results" / option("--run_name")
for folder in ("checkpoints", "adapter"):
    (results / folder).mkdir(parents=True, exist_ok=True)
reached = results / "checkpoints" / "reached"
until = int(option("--pause_at_step")) if "--pause_at_step" in sys.argv else steps
first = int(reached.read_text()) + steps // 4 if reached.exists() else 0
for step in range(first, steps + 1, steps // 4):
    {does}
    print(json.dumps({{"step": step, "eval_mean_loss": 3 - step * rate}}), flush=True)
    if step == until:
        reached.write_text(str(step))
        sys.exit(138 * (until < steps))
"""
FOLDER = "2.1_lora_finetuning/run_0_cpu_x1"
RATES = ("1e-4", "1e-3", "1e-2", "30")
FEW = ("--validation_rows", "9", "--train_rows", "32", "--per_device_train_batch_size", "4")


def swept(folder: Path, *arguments: str) -> tuple[int, str]:
    log = folder / "sweep.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "common.sweep", FOLDER, *arguments, "--results_root", str(folder)]
    code = run_forked(command, REPOSITORY, {**os.environ, "OMP_NUM_THREADS": "1"}, log, 300)
    return code, log.read_text()


@pytest.mark.slow
def test_runs_that_fall_behind_end_early_and_a_second_call_repeats_what_has_failed(tmp_path: Path) -> None:
    asked = ("--learning_rate", *RATES, "--steps", "16", *FEW)
    code, said = swept(tmp_path, *asked)
    assert code == 0, said
    losses = losses_in(tmp_path)
    assert losses.keys() == set(map(float, RATES))
    assert losses.pop(30.0).keys() == {0}  # its gradients are not finite
    assert sorted(max(of_run) for of_run in losses.values()) == [4, 8, 16]
    (best,) = (rate for rate, of_run in losses.items() if 16 in of_run)
    record = load_record(tmp_path / "results" / f"sweep-learning_rate-{best:g}" / RECORD_NAME)
    assert (record["status"], record["steps"]) == ("completed", 16)
    assert record["checkpoints"]["went_on_from"]
    assert record["best_validation_loss"] == min(loss for step, loss in losses[best].items() if step)
    assert re.search(rf"best: .*--learning_rate {best:g}", said)
    code, again = swept(tmp_path, *asked)
    assert code == 0
    assert again.partition("before training")[2] == said.partition("before training")[2]
    assert set(re.findall(r"(\S+): step", again)) == {"learning_rate-30"}
    assert swept(tmp_path, "--learning_rate", *RATES, "--steps", "20", *FEW)[0] == 2


def sweep_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, does: str, *options: str, rates: str = "0.01 0.02 0.04"
) -> Sweep:
    """Sweep in this process, with runs that only print losses, which fall with the rate, or do what `does` says."""
    run = folder / "run"
    run.write_text(RUN.format(python=PYTHON, does=does))
    run.chmod(0o755)
    monkeypatch.setattr(sweeping.sys, "executable", str(run))
    asked = [FOLDER, "--learning_rate", *rates.split(), "--steps", "16", *options, "--results_root", str(folder)]
    monkeypatch.setattr(sweeping.sys, "argv", ["sweep", *asked])
    main()
    return sweep_of()


def losses_in(folder: Path) -> dict[float, dict[int, float]]:
    """The losses that a sweep has kept, by the rate and the step; of one with a single rank."""
    state = json.loads((folder / "results" / "sweep" / STATE).read_text())
    return {
        settings["learning_rate"]: {int(step): loss for step, loss in losses.items()}
        for settings, losses in zip(state["asked"]["grid"], state["losses"].values(), strict=True)
    }


def test_the_printed_command_is_the_best_run_s_and_weights_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_here(tmp_path, monkeypatch, "", "--train_rows", "32")
    said = capsys.readouterr().out
    folder, *words = shlex.split(re.search(r"best: .*common.launch (.*)", said)[1])
    run = run_of_folder(folder_named(folder), words)
    assert (run.learning_rate, run.train_rows, run.run_name) == (0.04, 32, "sweep-best")
    assert (run.max_steps, run.baseline) == (RunConfig.max_steps, RunConfig.baseline)  # a whole run again
    assert len(list(tmp_path.glob("results/sweep-learning_rate-*"))) == 3
    assert not [each for name in WEIGHTS for each in tmp_path.glob(f"results/*/{name}")]
    assert (tmp_path / "results" / "sweep" / PICTURE).stat().st_size > 10_000


def test_the_picture_has_a_line_for_each_rank_and_a_panel_for_each_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sweep_here(tmp_path, monkeypatch, "", "--lora_r", "8", "32", rates="0.01 0.02")
    asked.continue_from_state()
    first, *_, last = (figure := asked.picture()).axes
    assert [axes.get_title() for axes in figure.axes] == ["step 4", "step 8", "step 16"]
    assert {line.get_label() for line in first.lines} == {"lora_r 8", "lora_r 32"}
    assert [line.get_xydata().tolist() for line in first.lines] == [[[0.01, 2.96], [0.02, 2.92]]] * 2
    assert [list(line.get_xdata()) for line in last.lines] == [[0.02], []]


def test_half_the_steps_find_a_rate_near_the_best_of_the_grid_of_the_real_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the losses of the kept runs, each of 40 steps."""
    rates = ("3e-5", "1e-4", "3e-4", "1e-3")
    runs = (
        json.loads((REPOSITORY / REAL / f"real-lora-r8-lr{float(rate):g}-seed42.json").read_text()) for rate in rates
    )
    found = {run["config"]["learning_rate"]: dict(run["validation_losses"]) for run in runs}

    def advance(_: Sweep, trial: Trial, until: int) -> None:
        trial.losses.update({until: found[trial.settings["learning_rate"]][until]})

    monkeypatch.setattr(Sweep, "_advance", advance)
    asked = ["--learning_rate", *rates, "--results_root", str(tmp_path)]
    best = (sweep := sweep_of([FOLDER, *asked])).take()
    assert best.losses[40] <= 1.02 * min(losses[40] for losses in found.values())
    assert sum(max(trial.losses) for trial in sweep.trials) <= 40 * len(rates) / 2


def test_an_interrupted_sweep_repeats_what_had_not_ended_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt = "if rate == 0.01 and step == 4: os.kill(os.getppid(), signal.SIGINT); signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        sweep_here(tmp_path, monkeypatch, interrupt, rates="0.02 0.04 0.01")
    found = losses_in(tmp_path)
    assert 4 not in found.pop(0.01)  # its first loss may have been read before
    assert found == {0.02: {0: 3, 4: 2.92}, 0.04: {0: 3, 4: 2.84}}
    sweep_here(tmp_path, monkeypatch, "assert rate != 0.02, 'taken again'", rates="0.02 0.04 0.01")
    steps = {rate: max(losses) for rate, losses in losses_in(tmp_path).items()}
    assert steps == {0.01: 4, 0.02: 4, 0.04: 16}


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_a_run_that_is_refused_ends_the_sweep_with_its_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at_once: str,
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sweep_here(tmp_path, monkeypatch, 'print("error: no rows are left."); sys.exit(2)', "--at_once", at_once)
    assert capsys.readouterr().err == "error: no rows are left.\n"


def test_a_sweep_whose_runs_all_fail_on_the_way_names_no_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="No run reached its last step"):
        sweep_here(tmp_path, monkeypatch, "if step: sys.exit('the loss is not finite')")
    said = capsys.readouterr().out
    assert said.count("failed: the loss is not finite") == 3
    assert "best:" not in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--learning_rate", "1e-3"), "nothing to choose"),
        (("--learning_rate", "1e-3", "1e-3"), "nothing to choose"),
        (("--learning_rate", "0", "1e-3"), "learning_rate is 0"),
        (("--learning_rate", "1e-4", "1e-3", "--lora_r", "0"), "lora_r is 0"),
        (("--learning_rate", "1e-4", "1e-3", "--steps", "6"), "multiple of 4"),
        (("--learning_rate", "1e-4", "1e-3", "--at_once", "0"), "at_once is 0"),
        (("--learning_rate", "1e-4", "1e-3", "--max-steps=9"), "max_steps is set by the sweep"),
        (("--learning_rate", "1e-4", "1e-3", "--lora_dropout", "2"), "lora_dropout is 2"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        sweep_of([FOLDER, *arguments])


def test_a_folder_with_several_workflows_is_refused_and_preferences_keep_their_baseline() -> None:
    rates = ("--learning_rate", "1e-4", "1e-3")
    with pytest.raises(BadInputError, match="3 workflows"):
        sweep_of(["3.2_summarization/run_0_cpu_x2", *rates])
    sweep = sweep_of(["3.4_preference_tuning/run_0_cpu_x1", *rates])
    assert "--baseline" not in sweep.options_of(sweep.trials[0], 10)


def test_runs_beside_each_other_share_the_gpus_that_the_sweep_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(device="cuda", parallel="ddp", devices=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert groups_of_gpus(run, 1) == [""]
    assert groups_of_gpus(run, 2) == ["3,5", "6,7"]
    with pytest.raises(BadInputError, match="--at_once 2"):
        groups_of_gpus(run, 3)


def test_a_sweep_leaves_the_hub_to_its_runs() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    asked = [PYTHON, "-c", "import os, common.sweep; print(os.environ.get('HF_HUB_OFFLINE'))"]
    done = subprocess.run(asked, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
