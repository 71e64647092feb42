"""Published prices of rented GPUs (`prices.toml`); a file of the same form takes their place with `--prices`."""

import tomllib
from dataclasses import dataclass, fields
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from common.base.errors import BadInputError, begin_of, reading
from common.hardware.devices import Gpu, find_gpu

PRICES = Path(__file__).with_name("prices.toml")
ON_DEMAND, SPOT = "on demand", "spot"
CURRENCY = "USD"
NEXT_STEP = "common/hardware/prices.toml shows the form"


@dataclass(frozen=True)
class Price:
    """What a provider asked for a GPU on a day, without tax."""

    provider: str
    gpu: str  # by its name in the catalogue
    usd_per_hour: float  # of one GPU
    date: str  # when it was read: year and month at least
    source: str
    kind: str = ON_DEMAND  # or spot: the provider may take the machine back
    gpus: int = 1  # of the machine that is rented; without a `machine` also as many machines' worth
    machine: str = ""  # its name, where only it is rented

    @property
    def said(self) -> str:
        """The price with its day and source, in words."""
        return f"{self.usd_per_hour:g} USD per hour, read {self.date} ({self.provider}: {self.source})"


@cache
def read_prices(path: Path = PRICES) -> tuple[Price, ...]:
    """Return the prices of a file, in its order.

    Raises:
        BadInputError: It is no TOML, or a price has an unknown GPU or key, another currency, or a date to come.
    """
    with reading(str(path), f"Write `[[prices]]` tables: {NEXT_STEP}."):
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("prices")
    if not rows or not isinstance(rows, list):
        raise BadInputError(f"{path} has no [[prices]]: {NEXT_STEP}.")
    return tuple(_price(dict(row), f"price {number} of {path}") for number, row in enumerate(rows, 1))


def _price(row: dict[str, Any], place: str) -> Price:
    currency = row.pop("currency", CURRENCY)
    if currency != CURRENCY:
        raise BadInputError(f"{place} is in {begin_of(currency, 20)}: convert it, as bills are in {CURRENCY}.")
    needed, known = {"provider", "gpu", "usd_per_hour", "date", "source"}, {each.name for each in fields(Price)}
    for what, keys in (("lacks", needed - row.keys()), ("has the unknown", row.keys() - known)):
        if keys:
            raise BadInputError(f"{place} {what} {', '.join(sorted(keys))}: {NEXT_STEP}.")
    try:
        price = Price(**row | {"gpu": find_gpu(str(row["gpu"])).name, "date": str(row["date"])})
    except BadInputError as unknown:
        raise BadInputError(f"{place}: {unknown}") from None
    usd = price.usd_per_hour
    checks = (
        ("usd_per_hour", isinstance(usd, int | float) and 0 < usd < 1_000, "a number above 0 and below 1,000"),
        ("gpus", isinstance(price.gpus, int) and 0 < price.gpus <= 1_024, "a whole number above 0"),
        ("kind", price.kind in (ON_DEMAND, SPOT), f"{ON_DEMAND!r} or {SPOT!r}"),
        ("date", _is_past(price.date), "a day that has been, as 2026-11-30"),
    )
    for name, holds, must in checks:
        if not holds:
            raise BadInputError(f"{place} has {name} {begin_of(repr(getattr(price, name)), 40)}: it must be {must}.")
    return price


def _is_past(day: str) -> bool:
    try:
        return date.fromisoformat((day + "-01")[:10]) <= date.today()
    except ValueError:
        return False


@cache
def usual_price(gpu: Gpu | None) -> Price | None:
    """Return what a plan of this GPU alone is billed by: the first price on demand; None where none is published."""
    usual = (each for each in read_prices() if gpu and (each.gpu, each.kind) == (gpu.name, ON_DEMAND))
    return next(usual, None)
