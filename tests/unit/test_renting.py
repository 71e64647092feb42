"""What to rent: the frontier over all priced machines, its bills, its choice, and what it refuses."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.planner_command import main
from common.checks.rent_command import _padded, hours_until
from common.hardware.devices import CATALOGUE, GIB, find_gpu
from common.hardware.prices import ON_DEMAND, SPOT, Price, read_prices, usual_price
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, EvaluationShape, Job
from common.planning.plans import make_plan
from common.planning.published_rates import slowest
from common.planning.renting import WORTH_IT, Rental, Training, chosen, frontier, rentals, worth_naming
from common.planning.step_speed import generation_of

Asked = Callable[..., tuple[int, str, str]]
SMOLLM = read_architecture("smollm2-135m")
EVALUATION = EvaluationShape(rows=32, length=512, labelled=512, prompt_length=512, new_tokens=48)
TRAINING = Training(
    SMOLLM,
    Job("lora", "single", BatchShape(1, 512, labelled=512), evaluation=EVALUATION),
    length_of=lambda *_: 256,
    rows=30_000,
    rows_per_step=16,
    techniques=("full", "lora"),
)
PRICE = Price("Here", "RTX A6000 48GB", 0.5, "2026-11-01", "https://example.org")


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The command line's exit code, output and errors."""

    def ask(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["planner", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return ask


@pytest.fixture(scope="module")
def found() -> list[Rental]:
    """Everything that fits of all prices."""
    return list(rentals(TRAINING, read_prices(), (1, 2, 4, 8), {}))


def test_nothing_on_the_frontier_is_beaten_and_all_of_it_fits(found: list[Rental]) -> None:
    best = frontier(found)
    for cheaper, faster in pairwise(worth_naming(best)):
        assert faster.most_hours < WORTH_IT * cheaper.most_hours
    for cheaper, faster in pairwise(best):
        assert cheaper.most_usd <= faster.most_usd
        assert cheaper.most_hours > faster.most_hours
    for rental in best:
        assert rental.plan.fits
        assert rental.plan.job.evaluation.rows > 1
    whole = [rental for rental in found[::40] if rental.plan.with_rows_chosen().fits]
    for rental in whole:  # with all its phases a plan may take longer than was estimated with the most rows at once
        usd, hours = 1.1 * rental.most_usd, 1.1 * rental.most_hours
        assert any(each.most_usd <= usd and each.most_hours <= hours for each in best), rental.said


def test_a_bill_is_the_whole_run_s_hours_on_all_gpus(found: list[Rental]) -> None:
    rental = next(each for each in found if len(each.plan.cluster.gpus) == 4)
    job, parts = rental.plan.job, rental.plan.phase_times
    usual = replace(job, batch=replace(job.batch, length=256, labelled=256))  # rows are half as long as the longest
    step_s = make_plan(SMOLLM, usual, rental.plan.cluster, {}).time.total_s
    assert rental.plan.rows_per_step * job.accumulation_steps == TRAINING.rows_per_step
    assert rental.training_s == pytest.approx(TRAINING.rows / (job.batch.rows * 4) * step_s)
    preparing_s = 600 + 2 * SMOLLM.parameters / 0.125e9  # a minute of it is the model's two bytes a weight
    run_s = parts.loading_s + 2 * parts.answering_s + rental.training_s + rental.saving_s
    usd_per_s = 4 * rental.price.usd_per_hour / 3600
    assert rental.usd == pytest.approx((preparing_s + run_s) * usd_per_s)
    factor = slowest(find_gpu(rental.price.gpu), SMOLLM)
    assert rental.most_usd == pytest.approx((preparing_s + factor * run_s) * usd_per_s)


def test_rows_of_varying_length_are_planned_with_their_padding() -> None:
    lengths = [10] * 90 + [1000] * 10
    length_of = _padded(lengths)
    assert length_of(1, 1, 1) == 109  # alone nothing is padded
    assert 109 < length_of(4, 1, 1) < length_of(16, 1, 1) < 1000
    assert length_of(4, 4, 1) == length_of(16, 1, 1)  # all ranks wait for the longest row
    even = replace(TRAINING, length_of=lambda *_: 109)
    padded = replace(TRAINING, length_of=length_of)
    (one, other) = (next(rentals(each, (PRICE,), (1,), {})).training_s for each in (even, padded))
    assert one < other


def test_spot_is_left_out_where_it_is_not_wanted(asked: Asked) -> None:
    code, out, _ = asked("--model", "smollm2-135m", "--gpu", "any", "--on-demand", "--json")
    assert code == 0
    assert {each["kind"] for each in json.loads(out)["frontier"]} == {ON_DEMAND}


def test_better_techniques_are_named_beside_what_is_cheapest(asked: Asked) -> None:
    _, out, _ = asked("--model", "smollm2-135m", "--gpu", "any", "--budget", 20, "--json")
    answer = json.loads(out)
    assert answer["recommended"]["technique"] == "lora"
    assert re.search("In better quality .*full fine-tuning", answer["recommendation"])


def test_the_same_machine_costs_by_its_price_alone() -> None:
    dear, cheap = (replace(PRICE, usd_per_hour=usd) for usd in (2.0, 0.5))
    by_price = {each.price.usd_per_hour: each for each in rentals(TRAINING, (dear, cheap), (1,), {})}
    assert by_price[2.0].usd == pytest.approx(4 * by_price[0.5].usd)
    assert by_price[2.0].hours == by_price[0.5].hours


def test_machines_are_rented_as_they_are_sold() -> None:
    def counts(price: Price) -> set[int]:
        return {len(each.plan.cluster.gpus) for each in rentals(TRAINING, (price,), (1, 2, 4, 8), {})}

    assert counts(PRICE) == {1, 2, 4, 8}
    assert counts(replace(PRICE, gpus=4)) == {4, 8}
    assert counts(replace(PRICE, gpus=4, machine="big.4")) == {4}


def test_choices_keep_their_limits_even_at_most(found: list[Rental]) -> None:
    best = frontier(found)
    assert chosen(best) is best[0]
    middle = best[len(best) // 2]
    assert chosen(best, deadline_h=middle.most_hours) is middle
    assert chosen(best, budget_usd=middle.most_usd) is middle
    assert chosen(best, budget_usd=best[0].most_usd * 0.99) is None
    assert chosen(best, best[0].most_usd, best[-1].most_hours) is None


def test_what_is_chosen_is_named_though_it_is_hardly_sooner() -> None:
    (cheap,) = rentals(replace(TRAINING, techniques=("lora",)), (PRICE,), (1,), {})
    hardly_sooner = replace(cheap, training_s=0.97 * cheap.training_s, price=replace(PRICE, usd_per_hour=0.6))
    best = frontier((cheap, hardly_sooner))
    assert len(best) == 2
    assert worth_naming(best) == [cheap]
    deadline_h = (cheap.most_hours + hardly_sooner.most_hours) / 2
    choice = chosen(best, deadline_h=deadline_h)
    assert choice.price.usd_per_hour == 0.6
    assert choice in worth_naming(best, choice)


def test_cards_whose_speed_is_assumed_have_wider_bounds() -> None:
    factors = {gpu.name: (not generation_of(gpu).assumed, slowest(gpu, SMOLLM)) for gpu in CATALOGUE}
    assert max(factor for is_known, factor in factors.values() if is_known) < min(
        factor for is_known, factor in factors.values() if not is_known
    )


def test_an_interruption_loses_half_of_what_lies_between_checkpoints_and_loading() -> None:
    (rental,) = rentals(replace(TRAINING, techniques=("lora",)), (replace(PRICE, kind=SPOT),), (1,), {})
    again_s = rental.preparing_s + rental.plan.phase_times.loading_s
    assert rental.training_s < 15 * 60  # no more than the whole training is lost
    assert rental.interruption_s(15.0) == rental.training_s / 2 + again_s
    assert rental.interruption_s(1.0) == 30 + again_s


@pytest.mark.parametrize(("deadline", "hours"), [("6h", 6.0), ("90m", 1.5), ("2d", 48.0), ("0.5h", 0.5)])
def test_deadlines_as_users_write_them(deadline: str, hours: float) -> None:
    assert hours_until(deadline) == hours


def test_a_deadline_is_also_a_time() -> None:
    tomorrow = datetime.now() + timedelta(hours=24)
    assert hours_until(tomorrow.isoformat(timespec="minutes")) == pytest.approx(24, abs=0.1)


def test_the_answer_is_a_frontier_a_choice_and_its_command(asked: Asked, tmp_path: Path) -> None:
    picture = tmp_path / "frontier.png"
    question = ("--model", "qwen2.5-7b", "--gpu", "any", "--budget", 50, "--deadline", "12h")
    code, out, _ = asked(*question, "--picture", picture)
    assert code == 0
    assert picture.stat().st_size > 1_000
    assert ": make run FOLDER=" in out
    assert "--num_train_epochs" in out
    assert all(len(line) <= 120 for line in out.splitlines() if line.startswith(("│", "╭")))
    code, out, _ = asked(*question, "--json")
    answer = json.loads(out)
    best = answer["recommended"]
    assert code == 0
    assert answer["figures"] == "projected"
    assert best in answer["frontier"]
    assert best["most_usd"] <= 50
    assert best["most_hours"] <= 12
    assert best["safe_gib"] <= best["capacity_gib"]
    weights_gib = 2 * read_architecture("qwen2.5-7b").parameters / GIB
    assert best["host_gib"] == pytest.approx(weights_gib, rel=0.1)  # the adapter is merged into them there
    assert f"{best['host_gib']:,.0f} GiB of the machine's own memory" in answer["recommendation"]
    assert answer["run"].startswith("make run FOLDER=")


def test_rows_are_counted_and_measured(asked: Asked, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "Why? " * (1 + number % 7), "answer": f"Because of {number}."} for number in range(200)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    code, out, _ = asked("--model", "assets/embedded_base", "--data", file, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["rows"] == 160  # a tenth each is held out, to choose by and to report on
    assert any("answers to 20 questions" in line for line in answer["assumptions"])
    assert 5 < answer["mean_length"] < 100
    assert f"--data {file}" in answer["run"]
    assert not any("are cut" in line for line in answer["assumptions"])
    _, out, _ = asked("--model", "assets/embedded_base", "--data", file, "--seq-len", 20, "--json")
    assert re.search(r"\d+ are cut at 20 tokens: --seq-len \d+ keeps them whole", out)
    code, out, _ = asked("--model", "qwen2.5-7b", "--data", file, "--json")
    estimated = json.loads(out)
    texts = [row["question"] + row["answer"] for row in rows]
    assert estimated["mean_length"] == pytest.approx(mean(map(len, texts)) / 4 + 16, abs=2)
    assert any("estimated" in line for line in estimated["assumptions"])


@pytest.mark.parametrize(
    ("question", "code", "said"),
    [
        ("--budget 0.01", 1, "Nothing keeps 0.01 USD. The cheapest: "),
        ("--gpu any --deadline 1m --technique full", 1, "The fastest: "),
        ("--gpu t4 --gpus 1 --technique full --deadline 2d", 1, "Nothing fits of what is sold with 1 GPUs"),
        ("--gpu any --parallel zero3", 2, "planned with single, ddp, fsdp: leave out --parallel"),
        ("--gpu any --usd-per-hour 1 --explain", 2, "leave out --usd-per-hour, --explain"),
        ("--gpu any --gpus 16", 2, "one machine, which has at most 8 GPUs"),
        ("--gpu any --gpus 2 --parallel single", 2, "--parallel single is not for --gpus 2"),
        ("--gpu t4 --rows-per-step 8", 2, "--rows-per-step is for what to rent"),
        ("--gpu any --gpus 3", 2, "which 3 GPUs cannot share evenly: pass --rows-per-step 15"),
        ("--data nowhere.csv", 2, "there is no such file"),
        ("--gpu any --deadline 2020-01-01", 2, "which has passed: pass a time to come"),
        ("--gpu any --deadline soon", 2, "pass 6h, 90m, 2d or a time"),
        ("--budget 0", 2, "--budget is 0.0, but must be above 0"),
        ("--gpu a60000 --budget 5", 2, "Did you mean RTX A6000 48GB?"),
        ("--gpu any --nodes 2", 2, "leave out --nodes"),
        ("--gpu any --prices nowhere.toml", 2, "nowhere.toml cannot be read"),
        ("--gpu any --picture nowhere/frontier.png", 2, "cannot be written"),
        ("--gpu any --picture frontier.xyz", 2, "name a .png or .svg file"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(question: str, code: int, said: str, asked: Asked) -> None:
    ended, out, error = asked("--model", "qwen2.5-7b", *question.split())
    assert ended == code
    assert said in (error if code == 2 else out)
    assert code == 1 or error.count("\n") == 1


def test_a_model_without_a_closed_form_is_refused(tmp_path: Path, asked: Asked) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv", "hidden_size": 64}', encoding="utf-8")
    code, _, error = asked("--model", tmp_path, "--gpu", "any")
    assert code == 2
    assert "What to rent needs it" in error


PRICES = """
[[prices]]
provider = "Mine"
gpu = "a6000"
usd_per_hour = 0.4
date = "2026-11-01"
source = "my contract"
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"a6000"', '"a60000"', "is not in the catalogue. Did you mean RTX A6000 48GB?"),
        ("0.4", "-0.4", "usd_per_hour -0.4: it must be a number above 0 and below 1,000"),
        ("0.4", '"0.4"', "usd_per_hour '0.4': it must be a number above 0"),
        ("2026-11-01", "2126-11-01", "date '2126-11-01': it must be a day that has been"),
        ("2026-11-01", "lately", "it must be a day that has been"),
        ('source = "my contract"', "", "lacks source"),
        ("provider", "seller", "lacks provider"),
        ('source = "my contract"', 'source = ""\ncurrency = "EUR"', "is in EUR: convert it"),
        ('source = "my contract"', 'source = ""\nkind = "reserved"', "it must be 'on demand' or 'spot'"),
        ('source = "my contract"', 'source = ""\ncolour = "red"', "has the unknown colour"),
        (PRICES, "prices = 3", "has no [[prices]]"),
    ],
)
def test_prices_that_cannot_be_are_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(PRICES.replace(old, new), encoding="utf-8")
    with pytest.raises(BadInputError) as refused:
        read_prices(file)
    assert said in str(refused.value)


def test_prices_of_one_s_own_take_the_others_place(tmp_path: Path, asked: Asked) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(PRICES, encoding="utf-8")
    code, out, _ = asked("--model", "smollm2-135m", "--prices", file, "--json")
    assert code == 0
    assert {(each["provider"], each["gpu"]) for each in json.loads(out)["frontier"]} == {("Mine", "RTX A6000 48GB")}


def test_published_prices_have_cards_sources_and_dates() -> None:
    prices = read_prices()
    assert len({price.provider for price in prices}) >= 10
    assert {price.kind for price in prices} == {ON_DEMAND, SPOT}
    keys = [(price.provider, price.gpu, price.gpus, price.kind, price.machine) for price in prices]
    assert len(set(keys)) == len(keys)
    for price in prices:
        assert price.source.startswith("https://"), price
        assert date(2026, 1, 1) <= date.fromisoformat((price.date + "-01")[:10]), price
        assert 0.02 < price.usd_per_hour < 20, price
    assert usual_price(find_gpu("a6000")).usd_per_hour == 0.53  # tables of the readmes are billed by it
    assert usual_price(None) is None
    assert RunConfig.max_lost_minutes == 15  # what the page of spot prices says of an interruption
