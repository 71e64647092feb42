"""What serving a tuned model takes (`--serve`): its weights in each way, the cache of its rows, and cards for it."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from common.base.errors import NotPlannedError
from common.checks.planner_options import PlannerOptions, Tokens, cluster_of, job_of, short_option
from common.checks.rent_command import prices_of
from common.hardware.devices import find_gpu
from common.hardware.prices import usual_price
from common.planning.architectures import Architecture, read_architecture
from common.planning.job import Job
from common.planning.model_configs import usual_tiles
from common.planning.plan_texts import outlined
from common.planning.plans import check_fit
from common.planning.serving_plan import GGUF_BYTES, GGUF_FAMILIES, WAYS, Serving, sliding_layers
from common.planning.shares import whole_model

# options that it takes
OF_SERVING = {"model", "model_revision", "serve", "gpu", "gpu_memory_gib", "gpu_tflops", "per_device_train_batch_size",
              "max_length", "max_target_length", "tiles", "classes", "technique", "quantization", "lora_r",
              "target_modules", "prices", "json"}  # fmt: skip
CHEAPEST = 3  # cards that are named for each way to serve


def serve_answer(options: PlannerOptions) -> int:
    """Print what serving takes; 0 if a card holds all rows, else 1."""
    idle = {each.name for each in fields(options) if getattr(options, each.name) != each.default} - OF_SERVING
    if idle or isinstance(options.max_length, Tokens):
        said = f"leave out {short_option(options, min(idle))}" if idle else "pass --seq-len a number"
        raise NotPlannedError(f"--serve plans one card, 16 or 4 bits a weight, and rows of a given length: {said}.")
    architecture = read_architecture(options.model, options.model_revision, options.classes)
    if architecture.tower:
        options = replace(options, tiles=options.tiles or usual_tiles(options.model, options.model_revision))
    job, sliding = job_of(options), sliding_layers(architecture, options.model, options.model_revision)
    check_fit(architecture, job.suited_to(architecture))
    found = list(_served(options, architecture, job, sliding))
    fitting = [[each for each in found if each["fits"] == fits] for fits in ("yes", "tight")]
    best = min(fitting[0] or fitting[1], key=lambda each: each["usd_per_hour"] or 0.0, default=None)
    most = best or max(found, key=lambda each: each["max_rows"])
    instead = "pass fewer or shorter ones" if most["max_rows"] else "name a larger card, or pass shorter ones"
    fits = {"yes": "fit", "tight": "fit tightly"}.get(most["fits"], f"do not fit ({instead})")
    said = f"Rows of {job.batch.length:,} tokens, {job.batch.rows:,} at once, {fits}: "
    said += f"up to {most['max_rows']:,} are safe on {most['gpu']}, {most['way']}."
    assumed = [
        "rows are prompts with their answers; one is read while all others add a token"
        if most["cache_gib"]
        else "all rows are read at once",
        f"adapters of rank {job.lora_rank}, in fp32; all of the card serves (vLLM: --gpu-memory-utilization)",
        *([f"{sliding} of {architecture.layers} layers keep only their window"] if sliding else []),
        *dict.fromkeys(f"{each['gpu']}: {each['price']}" for each in found if each["price"]),
    ]
    if options.json:
        said_of = {"model": options.model, "figures": "projected", "recommendation": said, "assumptions": assumed}
        print(json.dumps(said_of | {"served": found}, indent=2))
    else:
        cells = [[f"{each:,.2f}" if isinstance(each, float) else each for each in row.values()][:-1] for row in found]
        print(outlined(cells, [name.replace("_", "\n", 1) for name in found[0]][:-1], range(3)))
        print("\n- ".join(["every figure is projected; assumed:", *assumed]), said, sep="\n\n")
    return 0 if best else 1


def _served(options: PlannerOptions, architecture: Architecture, job: Job, sliding: int) -> Iterator[dict[str, Any]]:
    """Yield each way on the cards that are named; else on the cheapest that hold all rows, or those that hold most."""
    names_cards, rows = (options.gpu or options.gpu_memory_gib) and not options.asks_what_to_rent, job.batch.rows
    if names_cards:
        cards = {gpu: usual_price(gpu) for gpu in cluster_of(options).gpus}
    else:  # on demand, as a server must stay
        prices = sorted(prices_of(replace(options, on_demand=True)), key=lambda price: -price.usd_per_hour)
        cards = {find_gpu(price.gpu): price for price in prices if price.gpus == 1}
    if not cards:
        raise NotPlannedError("None of these prices is of one card alone: leave out --prices, or name another --gpu.")
    gguf = GGUF_BYTES if architecture.model_type in GGUF_FAMILIES and not architecture.window else ()
    ways = {way: name for way, name in (WAYS | dict.fromkeys(gguf, "full")).items() if name in options.techniques}
    for way, technique in ways.items():
        own, whole = replace(job, technique=technique).suited_to(architecture), whole_model(architecture)
        own = replace(own, attention="sdpa")  # servers have a fused kernel for gpt-oss, too
        of_cards = (Serving(architecture, own, whole, gpu, way=way, rows=rows, sliding=sliding) for gpu in cards)
        found = [serving.figures(cards[serving.gpu]) for serving in of_cards]
        if not names_cards:
            found = sorted(found, key=lambda each: (-min(rows, each["max_rows"]), each["usd_per_hour"]))[:CHEAPEST]
        yield from found
