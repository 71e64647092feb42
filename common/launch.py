"""Start and end of a rank, the checks that the world is the one asked for, and the ways to start a world.

From a run folder, whatever its number of ranks:
    python -m common.launch --batch_size 8
"""

import atexit
import importlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from common.device_maps import device_name
from common.failures import RunStoppedError, is_of_the_network, said_by
from common.faults import fault_at
from common.hardware import find_gpu, gpu_of_device, gpus
from common.print_prefix import printing_with_prefix, rank_prefix
from common.run_config import (
    CLASSIFIED_WITH,
    LAST,
    REPOSITORY,
    SHARDED,
    SUMMARIZED_WITH,
    BadInputError,
    RunConfig,
    parse_overrides,
)
from common.secrets import hide_secrets, without_secrets
from common.watch import SLOW_FACTOR, die_with_parent, parent_is_gone

if TYPE_CHECKING:
    import torch

BAD_INPUT_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
TOLD_ALONE = f"error: this run was told to end (SIGTERM); --resume_from {LAST} goes on from its newest checkpoint."
TOLD_TO_END = "error: this rank was told to end (SIGTERM): its launcher, or another rank, says why."
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of what SIGKILL ended: Python's, and a shell's."""
END_S = 2.0
"""How long a process may take to end by itself when it is told to."""
LITERAL = re.compile(r"^RUN = RunConfig\(", re.MULTILINE)
SPEAK_FIRST_S = 2.0
"""Other ranks leave after rank 0 has spoken: their launcher ends all ranks once the first is gone."""
LAST_WORKS_S = 0.2
"""What a process group's threads have to let go of their last works; they need some thousandths of a second."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
DISTRIBUTED_TYPES = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}

SHARDING = {(technique, way) for technique in ("full", "lora") for way in ("ddp", *SHARDED)} | {("qlora", "fsdp")}
CLASSIFYING = {(technique, way) for technique in ("full", "lora") for way in CLASSIFIED_WITH}
"""What the workflow of classification (3.1) does."""
SUMMARIZING = {("full", way) for way in SUMMARIZED_WITH}
"""What the workflows of summarization (3.2) do."""
ALSO_DONE = {
    ("qlora", "single"): {("qlora", "ddp")},
    ("full", "pp"): {("lora", "pp")},
    **{("full", way): SHARDING for way in SHARDED},
}
"""What a folder's workflow does besides its literal's technique and way to share the work, when an override asks."""


@dataclass(frozen=True)
class Rank:
    """This process's place in the world."""

    rank: int
    world_size: int
    device: str
    """As torch spells it: `cpu`, `cuda:1`."""
    launcher: str
    """`python`, `notebook`, `nblaunch` (notebook_launcher), `acclaunch` (accelerate launch) or `torchrun`."""
    further_devices: tuple[str, ...] = ()
    """With model parallel: what this one process works on besides `device`."""
    is_process: bool = False
    """Whether the process is there for this run alone, and ends with it: in a notebook a reader may take his time."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that this rank works on."""
        return (self.device, *self.further_devices)

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0


def detect_launcher() -> str:
    """How this process was started."""
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    if "ipykernel" in sys.modules:
        return "nblaunch" if elastic else "notebook"
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        return "acclaunch"
    return "torchrun" if elastic else "python"


def check_world(run: RunConfig) -> None:
    """Refuse a world of another size than the run asks for, before a process group is made.

    Raises:
        BadInputError: with both sizes and the command that starts the right number.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != run.world_size:
        command = f"torchrun --nproc_per_node {run.world_size} " if run.world_size > 1 else "python "
        other = "" if run.is_sharded and started < 2 else f", or pass --devices {started} if that is meant"
        raise BadInputError(
            f"This run asks for {run.world_size} rank(s) (parallel {run.parallel}, devices {run.devices}), but "
            f"{started} started: use {command}my_workflow_<technique>.py, or `python -m common.launch`, which starts "
            f"the right number{other}."
        )
    check_gpus(run)


def check_gpus(run: RunConfig) -> None:
    """Refuse a GPU that the catalogue does not know, and more GPUs than there are.

    Raises:
        BadInputError: with the names known, or the number found and the command for that many.
    """
    if run.gpu:
        find_gpu(run.gpu)
    if run.device == "cpu":
        return
    found, needed = len(gpus()[1]), devices_here(run)
    if found == 0:
        raise BadInputError(
            f"This run asks for {needed} GPU(s), but none can be seen: `nvidia-smi` should list it; on a machine "
            "without one leave --device out, in a run folder for the CPU (run_0_cpu_...)."
        )
    if found < needed:
        from common.offers import offer  # here: it imports the planner, which imports this module

        raise BadInputError(f"This run asks for {needed} GPU(s), but {found} can be seen: {offer(run, gpus()[1])}.")
    gpu = gpu_of_device(gpus()[1][0])
    if gpu and gpu.tflops_dense[run.arithmetic] is None:
        raise BadInputError(f"precision is {run.precision}, which {gpu.name} does not compute: pass --precision fp32.")


def devices_here(run: RunConfig) -> int:
    """Devices of the run on this machine: all of them, or of several machines those that a launcher has named."""
    if run.world_size == 1:
        return run.devices
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1 if run.loop == "machines" else run.devices))


def start_rank(run: RunConfig) -> Rank:
    """Join the world as this process's rank: one thread on CPU, its own device on GPUs.

    Raises:
        BadInputError: the world has another size than the run asks for.
        RunStoppedError: another rank did not start in time.
        RuntimeError: the process group came up with another size, backend or type than asked for.
    """
    check_world(run)
    end_with_launcher()
    fault_at("start", 0)
    name_deepspeeds_device()
    leave_deepspeed_to_the_run(run)

    import torch
    from accelerate import PartialState
    from accelerate.utils import set_seed
    from transformers.utils.logging import disable_progress_bar

    on_cpu = run.device == "cpu"
    if not on_cpu and torch.accelerator.current_accelerator() is None:
        raise BadInputError(
            f"The driver lists {len(gpus()[1])} GPU(s), but PyTorch {torch.__version__} is built without CUDA: install "
            "the build for your driver (https://pytorch.org/get-started/locally)."
        )
    if on_cpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # else Accelerate warns that it does so itself
        torch.set_num_threads(1)  # a CPU "device" is one thread: then one rank against two is a fair comparison
    if run.world_size > 1:
        atexit.unregister(_let_groups_finish)
        atexit.register(_let_groups_finish)
        _wait_for_ranks(run)
    if run.world_size > 1 and was_restarted() and not torch.distributed.is_initialized():
        _join_anew(run)
    group = {"backend": BACKENDS[run.device], "timeout": timedelta(seconds=SLOW_FACTOR * run.step_timeout_s)}
    state = PartialState(cpu=on_cpu, **(group if run.world_size > 1 else {}))
    if run.world_size > 1:
        seen = (state.num_processes, torch.distributed.get_backend(), state.distributed_type.value)
        asked = (run.world_size, BACKENDS[run.device], DISTRIBUTED_TYPES[run.device])
        if seen != asked:
            raise RuntimeError(f"World size, backend and distributed type are {seen}, but {asked} were asked for.")
    if on_cpu:
        torch.set_num_threads(1)  # again: PartialState takes every core for a CPU world
        disable_progress_bar()  # weights of a CPU run load in a moment
    elif run.offload == "cpu":  # the optimizer works on the host, where torchrun gives a rank one thread
        torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    set_seed(run.seed)
    if not on_cpu and run.gpu and state.is_main_process and gpu_of_device(gpus()[1][0]) != find_gpu(run.gpu):
        print(f"note: this run folder was made for {run.gpu}; it runs on {gpus()[1][0]}")
    return Rank(
        rank=state.process_index,
        world_size=state.num_processes,
        device=device_name(run.device, state.local_process_index),
        launcher=detect_launcher(),
        further_devices=tuple(device_name(run.device, number) for number in range(1, run.devices))
        if run.parallel == "mp"
        else (),
        is_process=detect_launcher() != "notebook",
    )


def _let_groups_finish() -> None:
    """Wait a moment before Python ends, in which the process groups' threads let go of their last works.

    FSDP's meshes, DeepSpeed and default arguments of PyTorch's own functions hold groups to the very end, and their
    threads with them. One that drops a work's tensor just as Python begins to end is ended by Python in the midst of
    C++, which ends the rank by SIGABRT: on a busy machine, now and then, after everything was saved.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all was said: whoever is told to end now may go at once
    time.sleep(LAST_WORKS_S)


def threads_per_rank(ranks_here: int) -> int:
    """This machine's threads, divided among its ranks."""
    return max(1, (os.cpu_count() or 1) // ranks_here)


def was_restarted() -> bool:
    """Whether torchrun has started the ranks again, after one was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _store_of_this_start() -> "torch.distributed.Store":
    """Of torchrun's store a part of its own for each start of the ranks: it keeps what they say to the end."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait_for_ranks(run: RunConfig) -> None:
    """Wait until every rank is there, where torchrun, or what is built on it, started them.

    Raises:
        RunStoppedError: with those that did not come.
    """
    from torch.distributed import DistStoreError, is_initialized

    if is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    store, here = _store_of_this_start(), [f"rank{number}" for number in range(run.world_size)]
    store.set(here[int(os.environ["RANK"])], "is there")
    try:
        store.wait(here, timedelta(seconds=run.start_timeout_s))
    except DistStoreError:
        missing = ", ".join(str(number) for number, name in enumerate(here) if not store.check([name]))
        raise RunStoppedError(
            f"Rank {missing} did not start within {run.start_timeout_s:g} s (start_timeout_s): its output says why; "
            "where importing takes longer, pass a longer --start_timeout_s."
        ) from None


def _join_anew(run: RunConfig) -> None:
    """Join a world of ranks that were started again.

    Torchrun's store still has the addresses of the ranks before, and gloo would look for those.
    """
    from torch.distributed import init_process_group

    init_process_group(
        BACKENDS[run.device],
        store=_store_of_this_start(),
        rank=int(os.environ["RANK"]),
        world_size=run.world_size,
        timeout=timedelta(seconds=SLOW_FACTOR * run.step_timeout_s),
    )


def end_with_launcher() -> None:
    """Have this rank end with its launcher, however that is killed, and leave a record where it is told to end."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent()
    if parent_is_gone():  # before the kernel was told
        sys.exit("error: this rank's launcher is gone.")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TOLD_TO_END))


def accelerate_shards() -> bool:
    """Whether `accelerate launch` was given a file with FSDP: then Accelerate divides the model (on GPUs alone)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and bool(gpus()[1])


def leave_deepspeed_to_the_run(run: RunConfig) -> None:
    """Have Accelerate make no engine of DeepSpeed, as its file asks: with ZeRO the run makes it, as with torchrun."""
    if run.parallel.startswith("zero"):
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def name_deepspeeds_device() -> None:
    """Where no GPU can be seen: Accelerate imports DeepSpeed wherever it is installed, and it would look, and warn."""
    if not gpus()[1]:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def end_rank() -> None:
    """Leave the world: end the process group and forget Accelerate's state, so that another run can follow."""
    import torch
    from accelerate.state import AcceleratorState

    # DeepSpeed, where it took part, must forget the groups, too: else the next run in this process would get old ones
    deepspeed = sys.modules.get("deepspeed.comm")
    if deepspeed and deepspeed.is_initialized():
        deepspeed.destroy_process_group()
    elif torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


def _wait_for_the_others() -> None:
    """Leave together: a rank that is still sending when another has closed its connections may hang."""
    from accelerate.utils import wait_for_everyone

    wait_for_everyone()


@contextmanager
def rank_started(run: RunConfig) -> Iterator[Rank]:
    """A rank from its start to its end, with its prefix before every printed line."""
    rank = start_rank(run)
    try:
        with printing_with_prefix(rank_prefix(rank.rank, rank.device)):
            yield rank
        _wait_for_the_others()
    finally:
        end_rank()


def run_from_command_line(workflow: Callable[[RunConfig], object], defaults: RunConfig) -> None:
    """Run `workflow` with the command line's overrides."""
    with ended_by_one_sentence():
        workflow(parse_overrides(defaults))


@contextmanager
def ended_by_one_sentence() -> Iterator[None]:
    """A user's mistake ends in one sentence and exit code 2, what stops a run in one and exit code 1."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TOLD_ALONE))  # of a scheduler: with a record
    try:
        with secrets_hidden():
            yield
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: interrupted; --resume_from {LAST} goes on from the newest checkpoint.", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)
    except BadInputError as mistake:
        exit_with(mistake)
    except RunStoppedError as stopped:
        sys.exit(f"error: {stopped}")
    except RuntimeError as error:
        if not is_of_the_network(error):
            raise
        rank = os.environ.get("RANK", "0")
        sys.exit(
            f"error: rank {rank} ends, as another rank is gone ({said_by(error)}): that one's output says why; where "
            "it says nothing, it was killed, possibly as memory ran out (dmesg)."
        )


def run_or_launch(
    workflow: Callable[[RunConfig], object], run: RunConfig, script: str, overrides: Sequence[str]
) -> None:
    """Run `workflow` as this process's rank; where several are asked for and this is none, torchrun starts them.

    Raises:
        BadInputError: the run refuses its input; no rank was started.
    """
    if run.world_size > 1 and "WORLD_SIZE" not in os.environ:
        check_inputs(run)
        _become(run, script, overrides)
    workflow(run)


def ranks_command(run: RunConfig, script: str, overrides: Sequence[str]) -> list[str]:
    """What starts a workflow's ranks, one or several: this Python, or its torchrun."""
    if run.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it too, but warns about it
    if run.world_size == 1:
        return [sys.executable, script, *overrides]
    return torchrun_command(script, run.world_size, *overrides)


def _become(run: RunConfig, script: str, overrides: Sequence[str]) -> NoReturn:
    """Start a workflow's ranks, one or several, in this process's place."""
    command = ranks_command(run, script, overrides)
    sys.stdout.flush()
    os.execv(command[0], command)


@contextmanager
def secrets_hidden() -> Iterator[None]:
    """Errors leave without tokens and passwords of the environment."""
    try:
        yield
    except BaseException as error:
        hide_secrets(error)
        raise


def exit_with(mistake: BadInputError) -> NoReturn:
    """End with one sentence, once for each machine, and exit code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {mistake}", file=sys.stderr)
    else:
        time.sleep(SPEAK_FIRST_S)
    sys.exit(BAD_INPUT_EXIT_CODE)


def launch_in_notebook(workflow_module: str, overrides: dict[str, object], world_size: int) -> None:
    """Run a workflow on `world_size` ranks by Accelerate's `notebook_launcher`, on a port that is free now.

    `workflow_module` is imported by the ranks, not by the notebook: `notebook_launcher` forks, and refuses to where
    CUDA, an Accelerator or bitsandbytes (which PEFT imports) came to life before.

    Raises:
        BadInputError: a rank refused its input; nothing was written.
    """
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = (workflow_module, overrides)
    name_deepspeeds_device()  # the ranks are copies of this process
    try:
        notebook_launcher(_import_and_run, args=arguments, num_processes=world_size, use_port=str(free_port()))
    except ChildFailedError as failure:
        message = str(failure.get_first_failure()[1].message)
        if BadInputError.__name__ not in message:
            raise
        raise BadInputError(message.partition(f"{BadInputError.__name__}: ")[2].strip()) from None


def _import_and_run(workflow_module: str, overrides: dict[str, object]) -> None:
    module = importlib.import_module(workflow_module)
    settings = hasattr(module, "SETTINGS")
    run = module.defaults_for(overrides["technique"], overrides["parallel"]) if settings else module.RUN
    module.workflow(replace(run, **overrides))


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def stream_command(command: Sequence[str], cwd: str | Path | None = None) -> None:
    """Run a command and print its output line by line as it comes (a notebook's `!` would hide a failure).

    Raises:
        RuntimeError: the command ended with another exit code than 0.
    """
    print("$ " + shlex.join(command).replace(sys.executable, "python"))
    with subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(without_secrets(line), end="")
        except BaseException:  # an interrupted cell leaves nobody behind
            end_process(process)
            raise
    if process.returncode in KILLED:
        raise RuntimeError(
            "The command above was killed, possibly as memory ran out: look at the system's log (dmesg)."
        )
    if process.returncode != 0:
        raise RuntimeError(f"The command above ended with exit code {process.returncode}; its last lines say why.")


def end_process(process: subprocess.Popen) -> None:
    """End a launcher and, by the kernel, its ranks: politely, then soon by force."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def accelerate_command(script: str, config_file: str, *overrides: str) -> list[str]:
    """`accelerate launch` of this Python, on a port that is free now."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_file]
    return [*launch, "--main_process_port", str(free_port()), script, *overrides]


def torchrun_command(script: str, world_size: int, *overrides: str) -> list[str]:
    """`torchrun` of this Python, on a port that it finds itself."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(world_size),
        script,
        *overrides,
    ]


def check_inputs(run: RunConfig) -> None:
    """Check the run's settings, model, data, disk and memory, cheaply and before anything is written or started.

    Raises:
        BadInputError: what is unknown, missing or malformed, or cannot fit.
    """
    from common.data import load_splits
    from common.disk_needs import check_disk
    from common.models import any_shape_config, load_tokenizer
    from common.placement import check_placement_and_memory

    check_settings_and_data(run)
    if not (run.resume_from or was_restarted()):  # what it wrote before takes the room that it needs
        check_disk(run)
    if run.parallel == "tp":
        from common.tensor_parallel import check_divisible

        check_divisible(any_shape_config(run.model), run.devices)
    if run.is_sharded:
        from common.sharded_run import check_sharding_inputs

        check_sharding_inputs(run)
    if run.resume_from:
        from common.checkpoints import check_checkpoint

        check_checkpoint(run, detect_launcher(), len(load_splits(run).train))
    check_placement_and_memory(run, load_splits(run).train, load_tokenizer(run))


def check_settings_and_data(run: RunConfig) -> None:
    """Check the run's settings, model and data; not whether they fit.

    Raises:
        BadInputError: what is unknown, missing or malformed.
    """
    from transformers import SchedulerType
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )
    from transformers.training_args import OptimizerNames

    from common.data import load_splits
    from common.evaluation import check_independent_judge
    from common.models import check_attention, load_tokenizer
    from common.quantization import check_bitsandbytes

    check_folder(run)
    check_results_folder(run)
    check_gpus(run)
    check_attention(run)
    check_bitsandbytes(run)
    if run.task == "chat":
        check_independent_judge(run)
    for tracker in run.report_to.split(","):
        if tracker not in ("none", "all", *INTEGRATION_TO_CALLBACK):
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise BadInputError(f"report_to names {tracker!r}: choose none, or some of {known}.")
        if tracker in INTEGRATION_TO_CALLBACK and tracker not in get_available_reporting_integrations():
            raise BadInputError(f"report_to names {tracker}, which is not installed: `pip install {tracker}`.")
    for name, known in (("scheduler", SchedulerType), ("optimizer", OptimizerNames)):
        names = [choice.value for choice in known]
        if getattr(run, name) not in names:
            raise BadInputError(f"{name} is {getattr(run, name)!r}: choose one of {', '.join(names)}.")
    load_tokenizer(run)
    row_count = len(load_splits(run).train)
    if row_count < run.data_parallel_ranks:
        raise BadInputError(f"There are {row_count} training rows for {run.world_size} ranks: give each at least one.")


def check_results_folder(run: RunConfig) -> None:
    """Refuse results that could not be written, or that would go elsewhere.

    Raises:
        BadInputError: with the folder, and the reason.
    """
    folder = run.results_folder(run.run_name or "any").parent
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise BadInputError(
            f"Nothing can be written into {folder} ({error.strerror}): pass --results_root with a folder that can."
        ) from None
    own = folder / run.run_name
    if run.run_name and own.is_symlink():
        raise BadInputError(f"The results folder {own.name} is a link to elsewhere: pass another --run_name.")


def check_folder(run: RunConfig) -> None:
    """Refuse what the run folder's workflow does not do: it would do its own all the same.

    Raises:
        BadInputError: with both techniques, or both ways to share the work.
    """
    from common.siblings import literal_of  # here: it imports this module

    if not run.run_folder:
        return
    own = literal_of(REPOSITORY / run.run_folder)
    if run.task != own.task:
        raise BadInputError(
            f"task is {run.task}, but the workflow of {run.run_folder} is for {own.task}: leave --task out, or go to "
            "another folder."
        )
    kind = (own.technique, own.parallel)
    main = getattr(sys.modules["__main__"], "RUN", None)
    if isinstance(main, RunConfig) and main.run_folder == run.run_folder and main.loop != run.loop:
        raise BadInputError(
            f"loop is {run.loop}, but this workflow's is {main.loop}: leave --loop out, and take the other workflow of "
            f"{run.run_folder}."
        )
    by_task = {"classification": CLASSIFYING, "summarization": SUMMARIZING}
    also_done = by_task.get(own.task) or ALSO_DONE.get(kind, ())
    if (run.technique, run.parallel) in (kind, *also_done):
        return
    setting = "technique" if run.technique != own.technique else "parallel"
    raise BadInputError(
        f"{setting} is {getattr(run, setting)}, but the workflow of {run.run_folder} is for {own.technique} with "
        f"{own.parallel}: leave --{setting} out, or go to another folder (`python -m common.dry_run` and the planner "
        "take any)."
    )


def workflows_of(run_folder: Path) -> list[Path]:
    """The `my_workflow_*.py` of a run folder: one, or several that do the same in different ways.

    Raises:
        BadInputError: the folder has none.
    """
    found = sorted(run_folder.glob("my_workflow_*.py"))
    if not found:
        there = ", ".join(
            sorted({str(path.parent.relative_to(REPOSITORY)) for path in REPOSITORY.glob("*/run_*/my_workflow_*.py")})
        )
        here = run_folder.relative_to(REPOSITORY) if run_folder.is_relative_to(REPOSITORY) else run_folder
        raise BadInputError(f"{here} is no run folder, as it has 0 files my_workflow_*.py: choose one of {there}.")
    return found


def literal_file_of(run_folder: Path) -> Path:
    """The file with a run folder's `RUN = RunConfig(...)`: its workflow, or what its workflows share.

    Raises:
        BadInputError: it is no run folder, or has no literal.
    """
    files = [*workflows_of(run_folder), *sorted(run_folder.glob("my_utils_*.py"))]
    found = [path for path in files if LITERAL.search(path.read_text(encoding="utf-8"))]
    if len(found) != 1:
        raise BadInputError(
            f"{len(found)} files my_*.py of {run_folder.name} have a literal `RUN = RunConfig(...)` at their top: "
            "write one."
        )
    return found[0]


def main() -> None:
    """Check this run folder's run, then start it in this process's place; several workflows one after the other."""
    overrides = sys.argv[1:]
    try:
        scripts = workflows_of(Path.cwd())
        workflow = importlib.import_module(scripts[0].stem)
        if hasattr(workflow, "SETTINGS"):  # it starts its ranks itself
            os.execv(sys.executable, [sys.executable, scripts[0].name, *overrides])
        run = parse_overrides(workflow.RUN, overrides)
        check_inputs(run)
    except BadInputError as mistake:
        exit_with(mistake)
    if len(scripts) == 1:
        _become(run, scripts[0].name, overrides)
    run_each(scripts, run, overrides)


def run_each(scripts: Sequence[Path], run: RunConfig, overrides: Sequence[str]) -> None:
    """A folder's workflows one after the other, then their table."""
    from common.report_loops import results_text  # here: it imports this module
    from common.report_rows import results_in

    for number, script in enumerate(scripts, 1):
        print(f"\n== way {number} of {len(scripts)}: {script.name}", flush=True)
        named = ["--run_name", f"{run.run_name}-{script.stem.rpartition('_')[2]}"] if run.run_name else []
        stream_command(ranks_command(run, script.name, [*overrides, *named]))
    print(f"\n{results_text(results_in(run.results_folder('').resolve()))}")


if __name__ == "__main__":
    main()
