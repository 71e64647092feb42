"""Draw docs/step_time_by_machines.png: how long a step takes on more machines, for three networks (projected).

    python assets/draw_machines.py

Full fine-tuning of Qwen2.5-7B with FSDP on machines of eight A100, 8 rows of 1,024 tokens on each GPU: one model
divided among all GPUs, and hybrid sharding with a copy of the model on each machine.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from common.hardware.devices import find_gpu
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, Job
from common.planning.plans import make_plan
from common.planning.time_plan import Cluster, ethernet

PICTURE = Path(__file__).parents[1] / "docs" / "step_time_by_machines.png"
MACHINES, GPUS_OF_EACH, NETWORKS_GBIT = (1, 2, 4, 8, 16), 8, (25, 100, 400)
COLOURS = ("firebrick", "darkorange", "seagreen")


def step_s(machines: int, gbit: float, copies: int) -> float:
    """Return the planned seconds of a step."""
    gpus = (find_gpu("a100-80g"),) * (machines * GPUS_OF_EACH)
    job = Job(
        technique="full",
        parallel="fsdp",
        devices=len(gpus),
        batch=BatchShape(8, 1024, 1023),
        precision="bf16-mixed",
        gradient_checkpointing=True,
        dp_replicate_size=copies,
    )
    link = ethernet(gbit) if machines > 1 else None
    return make_plan(read_architecture("qwen2.5-7b"), job, Cluster(gpus, machines, link), {}).time.total_s


def main() -> None:
    """Draw the picture."""
    figure, axis = plt.subplots(figsize=(9, 4))
    for gbit, colour in zip(NETWORKS_GBIT, COLOURS, strict=True):
        for name, style, is_hybrid in (("one model", "--", False), ("a copy on each machine", "-", True)):
            seconds = [step_s(machines, gbit, machines if is_hybrid else 1) for machines in MACHINES]
            label = f"{gbit} Gbit/s, {name}"
            axis.plot(MACHINES, seconds, style, color=colour, marker="o", markersize=4, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(MACHINES, [str(machines) for machines in MACHINES])
    axis.set_xlabel("machines of 8 A100 (each GPU has 8 rows of 1,024 tokens a step)")
    axis.set_ylabel("seconds per step, projected")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
