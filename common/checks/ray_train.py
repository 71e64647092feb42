"""Start a run folder's workflow on the workers of Ray Train: the folder, or the workflow, that is named first.

    python -m common.ray_train 2.2_lora_finetuning_with_ddp/run_0_cpu_x2 --batch_size 8
    python -m common.ray_train --devices 8 --nodes 2 --max_failures 3

Without one it is the current folder. Workers are on the cluster of RAY_ADDRESS, or on the one that `ray start` began
here; else on this machine. Ray starts them again up to `--max_failures` times, after the newest checkpoint.
"""

import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from common.base.command_line import ended_by_one_sentence
from common.base.errors import BadInputError, RunStoppedError, is_of_the_network, said_by
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import workflows_of
from common.base.secrets import hide_secrets
from common.checks.folder_runs import import_workflow, run_of_arguments, run_of_folder
from common.runtime.watch import SLOW_FACTOR
from common.runtime.world import BACKENDS, RAY_RUN

# Ray repeats no line of several workers, reports nothing to its makers, leaves lines that are printed as they are, and
# has no watcher of machines that will be taken away, which no workflow here reacts to.
QUIET = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_METRICS_ENABLED": "0",
         "RAY_TRAIN_ENABLE_PRINT_PATCH": "0", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}  # fmt: skip
LOST = "its process was killed, possibly as memory ran out (dmesg), or its machine is gone"


def main() -> None:
    """Run the command line."""
    with ended_by_one_sentence():
        parser = OneSentenceParser(add_help=False)
        parser.add_argument("--max_failures", type=int, default=0)
        options, arguments = parser.parse_known_args()
        named = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else Path.cwd()
        script = script_of(named)
        run = run_of_folder(script.parent, arguments, parser.options)
        if importlib.util.find_spec("ray") is None:
            raise BadInputError("Ray is not installed: `pip install 'ray[train]'`, or start the run by torchrun.")
        train(run, script.resolve(), arguments, options.max_failures)


def script_of(named: Path) -> Path:
    """Return the workflow that is meant: a file, or the only one of a run folder.

    Raises:
        BadInputError: it is no run folder, or has several workflows.
    """
    scripts = [named] if named.is_file() else workflows_of(named)
    if len(scripts) > 1:
        raise BadInputError(f"{named} has several workflows: name one, {' or '.join(map(str, scripts))}.")
    return scripts[0]


def train(run: RunConfig, script: Path, arguments: Sequence[str], max_failures: int) -> None:
    """Train on Ray's workers, one for each rank; what they print is printed here.

    Raises:
        BadInputError: a worker refuses its input.
        RunStoppedError: with what ended the workers, or kept Ray from starting them.
    """
    os.environ |= QUIET | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(run.start_timeout_s)}
    import ray
    from ray.train import FailureConfig, LoggingConfig, ScalingConfig, TrainingFailedError
    from ray.train import RunConfig as RayRun
    from ray.train.torch import TorchConfig, TorchTrainer

    of_each = {"CPU": run.threads} if run.device == "cpu" else {"GPU": run.devices // run.world_size}
    connect(run.world_size * of_each.get("CPU", 1))
    found = {name: ray.cluster_resources().get(name, 0) for name in of_each}
    print(f"Ray starts {run.world_size} workers with {of_each} each; the cluster has {found}", flush=True)
    told = {
        "script": str(script.relative_to(REPOSITORY) if script.is_relative_to(REPOSITORY) else script),
        "arguments": list(arguments),
        "place": str(Path.cwd()),  # from which their paths mean
        "run": uuid4().hex,
    }
    with tempfile.TemporaryDirectory() as storage:  # the run's own results are in its folder
        trainer = TorchTrainer(
            work,
            train_loop_config=told,
            torch_config=TorchConfig(BACKENDS[run.device], timeout_s=int(SLOW_FACTOR * run.step_timeout_s)),
            scaling_config=ScalingConfig(
                num_workers=run.world_size,
                use_gpu=run.device == "cuda",
                resources_per_worker=of_each,
                placement_strategy="STRICT_PACK" if run.nodes == 1 else "SPREAD",
            ),
            run_config=RayRun(
                storage_path=storage,
                failure_config=FailureConfig(max_failures, controller_failure_limit=max_failures),
                logging_config=LoggingConfig("CRITICAL"),  # without tracebacks around a worker's refusal
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as failure:
            raise cause_of(failure) from None


def connect(cpus: int) -> None:
    """Connect to the cluster that there is, or begin one on this machine, for at least so many CPUs.

    Raises:
        RunStoppedError: no cluster is at RAY_ADDRESS, or none could begin here.
    """
    import ray

    quiet: dict[str, Any] = {"logging_level": "ERROR", "logging_config": ray.LoggingConfig(log_level="ERROR")}
    try:
        try:
            ray.init(num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, **quiet)
        except ValueError:  # a cluster that runs already has its own number
            ray.init(**quiet)
    except Exception as error:  # Ray has no class for it
        raise RunStoppedError(
            f"There is no Ray cluster, and none could begin here: {said_by(error)} (RAY_ADDRESS names one)."
        ) from None


def cause_of(failure: Exception) -> Exception:
    """Return why workers ended: what one of them said itself, before what followed from it on others."""
    errors: dict[int, Exception] = getattr(failure, "worker_failures", {})
    if not errors:
        return RunStoppedError(
            f"Ray did not start the workers: {said_by(getattr(failure, 'controller_failure', failure))}."
        )
    rank, error = min(errors.items(), key=lambda item: (is_of_the_network(item[1]), item[0]))
    said = next((each for each in errors.values() if isinstance(each, BadInputError | RunStoppedError)), None)
    if said is None and hasattr(error, "health_check_failure"):
        return RunStoppedError(f"Rank {rank} is lost: {LOST}.")
    return said or RunStoppedError(f"Rank {rank} failed ({type(error).__name__}: {said_by(error)}).")


def work(told: dict[str, Any]) -> None:
    """Run the workflow as one worker, which Ray has made a rank of its process group; Ray calls it."""
    os.environ[RAY_RUN] = told["run"]
    if Path(told["place"]).is_dir():  # which another machine may lack
        os.chdir(told["place"])
    sys.argv = [Path(told["script"]).name, *told["arguments"]]
    workflow = sys.modules["__main__"] = import_workflow(REPOSITORY / told["script"])  # as other launchers start it
    try:
        workflow.workflow(run_of_arguments(workflow, told["arguments"]))
    except BaseException as error:
        hide_secrets(error)
        if not (isinstance(error, BadInputError | RunStoppedError) or is_of_the_network(error)):
            traceback.print_exc()
        raise
