"""A rank from its start to its end, and the checks that the world is the one that was asked for."""

import atexit
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed, wait_for_everyone
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from common.base.command_line import how_to_resume, say_when_told_to_end
from common.base.errors import BadInputError
from common.base.launched import is_of_torchrun
from common.base.paths import command_here
from common.base.print_prefix import printing_with_prefix
from common.base.run_config import RunConfig
from common.base.signals import on_end_signal
from common.hardware.devices import device_name, find_gpu, gpu_of_device, gpus
from common.runtime.elastic import store_of_this_start
from common.runtime.faults import fault_at
from common.runtime.machines import LOOPBACK, use_interface_to
from common.runtime.torchrun import nodes_command
from common.runtime.watch import SLOW_FACTOR, die_with_parent, parent_is_gone
from common.runtime.world import BACKENDS, DISTRIBUTED_TYPES, Rank, detect_launcher

TOLD_TO_END = "error: this rank was told to end ({}): its launcher, or another rank, says why. "
LAST_WORKS_S = 0.2  # for a process group's threads to let go of their last works; some milliseconds are needed


def check_world(run: RunConfig) -> None:
    """Refuse a world of another size than the run asks for, before a process group is made."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    nodes = started // int(os.environ.get("LOCAL_WORLD_SIZE", started))
    if started != run.world_size:
        other = "" if run.parallelism.shards and started < 2 else f", or pass --devices {started} if that is meant"
        raise BadInputError(
            f"This run asks for {run.world_size} rank(s) (parallel {run.parallel}, devices {run.devices}), but "
            f"{started} started: use {start_command(run)}{other}."
        )
    if nodes != run.nodes:
        raise BadInputError(
            f"This run is for {run.nodes} machine(s), but its {run.world_size} ranks started on {nodes}: pass --nodes "
            f"{nodes} if that is meant{f', or use {start_command(run)}' if run.nodes > 1 else ''}."
        )
    check_gpus(run)


def start_command(run: RunConfig) -> str:
    """Return what starts a run's ranks: on each machine, where there are several."""
    script = "my_workflow_<technique>.py"
    command = shlex.join(nodes_command(run.nodes, run.ranks_per_node)) if run.world_size > 1 else "python"
    if run.nodes > 1:
        return f"`{command} {script}` on each of {run.nodes} machines (ADDRESS: the first one's)"
    return f"`{command} {script}`, or `{command_here('launch')}`, which starts the right number"


def check_gpus(run: RunConfig) -> None:
    """Refuse a GPU that the catalogue does not know, or cannot compute the precision, and more GPUs than there are."""
    if run.gpu:
        find_gpu(run.gpu)
    if run.device == "cpu":
        return
    # where no launcher says how many are on this machine
    needed = run.devices if run.world_size == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", run.ranks_per_node))
    found = len(gpus()[1])
    if found == 0:
        raise BadInputError(
            f"This run asks for {needed} GPU(s), but none can be seen: `nvidia-smi` should list it; on a machine "
            "without one leave --device out, in a run folder for the CPU (run_0_cpu_...)."
        )
    if found < needed:
        raise BadInputError(f"This run asks for {needed} GPU(s), but {found} can be seen: {on_fewer(run, found)}.")
    gpu = gpu_of_device(gpus()[1][0])
    if gpu and gpu.tflops_dense[run.compute_dtype] is None:
        raise BadInputError(f"precision is {run.precision}, which {gpu.name} does not compute: pass --precision fp32.")


def on_fewer(run: RunConfig, devices: int) -> str:
    """Return what to do on fewer GPUs than a run folder was made for."""
    if devices == 1 and not run.parallelism.replicates:
        return f"use a run folder of {run.goal.folder_for_one or run.method.folder_for_one}, which are for one"
    try:
        fewer = replace(run, devices=devices, nodes=1, link="")
    except BadInputError as refusal:
        return f"choose another run folder, as this one does not run on {devices} ({refusal})"
    launcher = shlex.join(nodes_command(1, devices)) if fewer.world_size > 1 else "python"
    options = f"--devices {devices}{' --nodes 1' if run.nodes > 1 else ''}"
    return f"use `{launcher} my_workflow_<technique>.py {options}`, and `{command_here('preflight')}` with them before"


def start_rank(run: RunConfig) -> Rank:
    """Join the world as this process's rank: `run.threads` threads on CPU, its own device on GPUs."""
    check_world(run)
    check_precision(run)
    end_with_launcher()
    fault_at("start", 0)
    name_deepspeeds_device()
    leave_sharding_to_the_run(run)
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)  # Accelerate's default, by which rank 0 alone would load
    on_cpu = run.device == "cpu"
    if on_cpu:
        os.environ.setdefault("OMP_NUM_THREADS", str(run.threads))  # else Accelerate warns that it does so itself
    elif torch.accelerator.current_accelerator() is None:
        raise BadInputError(
            f"The driver lists {len(gpus()[1])} GPU(s), but PyTorch {torch.__version__} is built without CUDA: install "
            "the build for your driver (https://pytorch.org/get-started/locally)."
        )
    state = _join_world(run) if run.world_size > 1 else PartialState(cpu=on_cpu)
    if on_cpu:
        torch.set_num_threads(run.threads)  # one, unless asked: then one rank against two is a fair comparison
        disable_progress_bar()  # weights of a CPU run load in a moment
    elif run.offload == "cpu":  # the optimizer works on the host, where torchrun gives a rank one thread
        torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    set_seed(run.seed)
    if not on_cpu and run.gpu and state.is_main_process and gpu_of_device(gpus()[1][0]) != find_gpu(run.gpu):
        print(f"note: this run folder was made for {run.gpu}; it runs on {gpus()[1][0]}")
    own_devices = run.devices if run.parallelism.layers_in_turn else 1
    return Rank(
        rank=state.process_index,
        world_size=state.num_processes,
        device=device_name(run.device, state.local_process_index),
        launcher=detect_launcher(),
        further_devices=tuple(device_name(run.device, number) for number in range(1, own_devices)),
        is_process=detect_launcher() != "notebook",
        host=socket.gethostname() if run.nodes > 1 else "",
    )


def exchange_timeout(run: RunConfig) -> timedelta:
    """Return how long an exchange between ranks may take, in every process group of the run."""
    return timedelta(seconds=SLOW_FACTOR * run.step_timeout_s)


def _join_world(run: RunConfig) -> PartialState:
    atexit.unregister(_let_groups_finish)
    atexit.register(_let_groups_finish)
    tqdm.monitor_interval = 0  # no thread of tqdm's, whose end would come before ours, and may meet a SIGTERM
    use_interface_to(os.environ["MASTER_ADDR"] if run.nodes > 1 else LOOPBACK, int(os.environ["MASTER_PORT"]))
    if not dist.is_initialized() and is_of_torchrun():
        rank = int(os.environ["RANK"])
        store = store_of_this_start(rank, run.world_size, run.start_timeout_s)
        store.set_timeout(exchange_timeout(run))  # NCCL's ranks meet there as late as their first exchange
        dist.init_process_group(
            BACKENDS[run.device], store=store, rank=rank, world_size=run.world_size, timeout=exchange_timeout(run)
        )
    state = PartialState(cpu=run.device == "cpu", backend=BACKENDS[run.device], timeout=exchange_timeout(run))
    seen = (state.num_processes, dist.get_backend(), state.distributed_type.value)
    asked = (run.world_size, BACKENDS[run.device], DISTRIBUTED_TYPES[run.device])
    if seen != asked:
        raise RuntimeError(f"World size, backend and distributed type are {seen}, but {asked} were asked for.")
    return state


def _let_groups_finish() -> None:
    """Wait a moment before Python ends, in which the process groups' threads let go of their last works.

    FSDP's meshes, DeepSpeed and default arguments of PyTorch's own functions hold groups to the very end, and their
    threads with them. One that drops a work's tensor just as Python begins to end is ended by Python in the midst of
    C++, which ends the rank by SIGABRT: on a busy machine, now and then, after everything was saved.
    """
    on_end_signal(signal.SIG_DFL)  # all was said: whoever is told to end now may go at once
    time.sleep(LAST_WORKS_S)


def threads_per_rank(ranks_here: int) -> int:
    """Return how many of this machine's threads each of its ranks gets."""
    return max(1, (os.cpu_count() or 1) // ranks_here)


def end_with_launcher() -> None:
    """Let this rank end with its launcher, however that is killed, and leave a record where it is told to end."""
    if not is_of_torchrun():
        return
    die_with_parent()
    if parent_is_gone():  # before the kernel was told
        sys.exit("error: this rank's launcher is gone.")
    if threading.current_thread() is threading.main_thread():
        say_when_told_to_end(TOLD_TO_END + how_to_resume())


def check_precision(run: RunConfig) -> None:
    """Refuse to compute in another precision than the run's: `accelerate launch` brings one from its file."""
    asked = {"fp32": "no", "fp16-mixed": "fp16"}.get(run.precision, "bf16")
    told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if detect_launcher() == "acclaunch" and told not in ("no", asked):
        raise BadInputError(
            f"The run's precision is {run.precision}, but Accelerate was told mixed_precision {told}: "
            "write 'no' into the file that `accelerate launch` reads."
        )


def leave_sharding_to_the_run(run: RunConfig) -> None:
    """Keep Accelerate from FSDP, or from making DeepSpeed's engine, as its file asks: the run does so itself."""
    if run.parallelism.uses_deepspeed:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if run.parallelism.uses_fsdp:
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def name_deepspeeds_device() -> None:
    """Tell DeepSpeed that there is no GPU: Accelerate imports it wherever it is installed, and it would warn."""
    if not gpus()[1]:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def end_rank() -> None:
    """Leave the world: end the process group and forget Accelerate's state, so that another run can follow."""
    # DeepSpeed, where it took part, must forget the groups, too: else the next run in this process would get old ones
    for groups in (sys.modules.get("deepspeed.comm", dist), dist):
        if groups.is_initialized():
            groups.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def rank_started(run: RunConfig) -> Iterator[Rank]:
    """Start a rank for the block's work, with its prefix before every printed line, and end it afterwards."""
    rank = start_rank(run)
    try:
        with printing_with_prefix(rank.prefix, is_quiet=run.log_level == "warning"):
            yield rank
        wait_for_everyone()  # leave together: a rank that still sends to one that has gone may hang
    finally:
        end_rank()
