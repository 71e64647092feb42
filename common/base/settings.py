"""The settings of a run, in groups; what Transformers, PEFT or TRL have too is called as they call it."""

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES


@dataclass(frozen=True)
class Range:
    """Values that a setting may have; `refusal` goes on after "name is value" of one outside, with its `default`."""

    holds: Callable[[float], bool]
    refusal: str


@dataclass(frozen=True)
class OnlyFor:
    """The only runs that a setting means something for: in others it is refused unless it is at its default."""

    runs: str
    applies: Callable[[Any], bool]  # to a `RunConfig`, which is made of these settings and cannot be imported here


# rows per rank that are validated and answered at once, at most, where a plan chooses them: more are hardly faster
MOST_EVALUATED_AT_ONCE = 32
AT_LEAST_0 = Range(lambda value: value >= 0, ", but must be at least 0: pass --{name} 1.")
AT_LEAST_1 = Range(lambda value: value >= 1, ", but must be at least 1: pass --{name} 1.")
AT_LEAST_2 = Range(lambda value: value >= 2, ", but must be at least 2: pass --{name} 2.")
ABOVE_0 = Range(lambda value: value > 0, ", but must be above 0, such as {default}.")
STEPS_OR_SHARE = Range(lambda value: value < 1 or value % 1 == 0, ": pass a whole number of steps, or a share below 1.")
BY_MODEL = -1.0  # a learning rate that the model's width and the technique give
ABOVE_0_OR_BY_MODEL = Range(
    lambda value: value > 0 or value == BY_MODEL, ", but must be above 0, such as {default}, or -1: by the model."
)
FRACTION = Range(lambda value: 0 <= value < 1, ", but is a fraction: pass a number from 0 up to, not with, 1.")
AT_LEAST_1_OR_ALL = Range(lambda value: value == -1 or value >= 1, ": pass a number of at least 1, or -1 for all.")
HELD = Range(lambda value: value <= 2**16, ", but no run has more than 65,536 at once: pass fewer, such as {default}.")
HELD_0, HELD_1 = (AT_LEAST_0, HELD), (AT_LEAST_1, HELD)
SECONDS = Range(
    lambda value: 0 < value <= 10**7,  # PyTorch counts them in nanoseconds
    ", but must be above 0 and at most 10,000,000 (four months): pass --{name} {default}.",
)

ADAPTERS = OnlyFor("LoRA and QLoRA", lambda run: run.method.has_adapters)
MP_AND_PP = OnlyFor("mp and pp (2.5, 2.7)", lambda run: run.parallelism.splits_layers)
QLORA = OnlyFor("qlora (2.3)", lambda run: run.method.quantizes)
ON_CPU = OnlyFor("the CPU", lambda run: run.device == "cpu")
SEVERAL_RANKS = OnlyFor("several ranks", lambda run: run.world_size > 1)
MESSAGES = OnlyFor("rows of messages", lambda run: run.goal.converses)
CLASSIFICATION = OnlyFor("classification (3.1)", lambda run: run.goal.classifies)
PP = OnlyFor("pp (2.7)", lambda run: run.parallelism.pipelines)
ONE_ANSWER = OnlyFor("rows of messages that are no pairs", lambda run: run.goal.converses and not run.goal.compares)
GIVEN_ANSWER = OnlyFor("rows with one answer to learn", lambda run: run.goal.converses and not run.goal.reads_log_probs)
TEXTS = OnlyFor("classification (3.1) and summarization (3.2)", lambda run: not run.goal.converses)
SUMMARIZATION = OnlyFor("summarization (3.2)", lambda run: run.goal.summarizes)
PREFERENCES = OnlyFor("pairs of answers (3.4)", lambda run: run.goal.compares)
LOG_PROBS = OnlyFor("pairs of answers, and answers with a reward (3.4, 3.5)", lambda run: run.goal.reads_log_probs)
REWARDS = OnlyFor("answers with a reward (3.5)", lambda run: run.goal.rewards)
PICTURES = OnlyFor("questions about pictures (3.3)", lambda run: run.goal.sees)
MACHINES_LOOP = OnlyFor("the machines workflow (3.2)", lambda run: run.loop == "machines")
LEARNT_ANSWERS = OnlyFor("rows with one answer to learn, without pictures", lambda run: run.goal.learns_answers)
WHOLE_LAYERS = OnlyFor("single, ddp and fsdp", lambda run: run.parallelism.calls_whole_layers)

_LIMITS_OF: dict[Field, tuple[Range | OnlyFor, ...]] = {}  # not in the fields' metadata, which becomes argparse's


def setting(
    default: object, doc: str, *limits: Range | OnlyFor, aliases: tuple[str, ...] = (), **for_argparse: object
) -> object:
    """Return a field of a run's settings; `doc` is its help, `limits` all hold, `aliases` are more of its options."""
    if default is False:
        for_argparse["metavar"] = "true|false"
    made = field(default=default, metadata={"help": doc, "aliases": list(aliases), **for_argparse})
    _LIMITS_OF[made] = limits
    return made


@dataclass(frozen=True)
class ModelSettings:
    """Which model, in which number format."""

    _argument_group_name = "model"  # the parser's heading in --help
    model: str = setting("assets/embedded_base", "Folder of a model, or the id of one on the Hugging Face Hub.")
    model_revision: str = setting("", "With a model of the Hub: a branch, tag or commit; empty = its main branch.")
    weights: Literal["pretrained", "random"] = setting(
        "pretrained", "random = random weights and the embedded tokenizer, for memory and speed without a download."
    )
    precision: Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"] = setting(
        "fp32", "Number format of weights and arithmetic; mixed = fp32 weights, arithmetic under autocast."
    )
    quantization: Literal["nf4", "nf4-double"] = setting(
        "nf4", "With qlora: format of the frozen weights; nf4-double = their scales are quantized, too.", QLORA
    )
    attention: Literal["eager", "sdpa", "flash", "flash3"] = setting(
        "sdpa", "Attention implementation; flash and flash3 (Hopper): the package flash-attn, with 16-bit weights."
    )
    use_liger_kernel: bool = setting(
        False,
        "With messages, on GPUs: fused kernels of the package liger-kernel for layers and loss.",
        OnlyFor("GPUs", lambda run: run.device == "cuda"),
        OnlyFor("single, ddp, fsdp, zero1 and zero2, where a rank's model is called with its whole head",
                lambda run: run.parallelism.calls_whole_head),
        OnlyFor("rows of messages without pictures or pairs", lambda run: run.goal.learns_answers),
    )  # fmt: skip


@dataclass(frozen=True)
class DataSettings:
    """Which rows, and what happens to those that do not fit."""

    _argument_group_name = "data"
    data: str = setting(
        "assets/exhibits",
        "Folder with files train, validation and test, one file (.jsonl, .json, .csv, .tsv, .parquet, .txt), fsspec "
        "URL of either, or dataset of the Hub; docs/your_own_data.md shows the formats.",
    )
    dataset_config: str = setting("", "Which of the configurations of a dataset of the Hub or its clone, if several.")
    dataset_revision: str = setting("", "With a dataset of the Hub: a branch, tag or commit; empty = its main branch.")
    dataset_train_split: str = setting("train", "The split to train on, of data with splits of their own.")
    dataset_test_split: str = setting("test", "The split to report on, of data with splits of their own.")
    prompt_column: str = setting("", "With conversations: the column with the questions.", ONE_ANSWER)
    completion_column: str = setting("", "With conversations: the column with the answers.", GIVEN_ANSWER)
    picture_noise: float = setting(
        0.0, "With visual_questions: standard deviation of noise on pictures (1 = full brightness).", FRACTION, PICTURES
    )
    text_column: str = setting("text", "With classification and summarization: the column with the texts.", TEXTS)
    label_column: str = setting("label", "With classification: the column with the labels.", CLASSIFICATION)
    summary_column: str = setting("summary", "With summarization: the column with the summaries.", SUMMARIZATION)
    train_on: Literal["assistant", "completion", "prompt", "all"] = setting(
        "assistant",
        "With messages: learn every answer (assistant), the last (completion), what is before it (prompt), or all.",
        GIVEN_ANSWER,
    )
    max_length: int = setting(256, "Longest training row, in tokens; longer rows are truncated.", AT_LEAST_2)
    pad_to_multiple_of: int = setting(
        0, "Batches are padded to a multiple of so many tokens, for fewer lengths; 0 = to the longest row.", AT_LEAST_0
    )
    max_target_length: int = setting(128, "With summarization: longest summary, in tokens.", AT_LEAST_2, SUMMARIZATION)
    max_truncated_fraction: float = setting(
        0.0, "With messages: fraction of rows that may lack an answer within max_length.", FRACTION, MESSAGES
    )
    long_texts: Literal["cut", "refuse"] = setting(
        "cut", "Rows beyond max_length, summaries beyond max_target_length: cut = cut and counted; refuse = refused."
    )
    control_tokens: Literal["text", "refuse"] = setting(
        "text", "What happens to control tokens in texts, such as <|im_end|>; text = they are read as characters."
    )
    empty_rows: Literal["refuse", "skip"] = setting(
        "refuse", "With classification and summarization: what happens to rows with an empty column.", TEXTS
    )
    shared_rows: Literal["auto", "refuse", "skip"] = setting(
        "auto", "Training rows among test rows: skip = left out; refuse; auto = messages are refused, texts reported."
    )
    train_rows: int = setting(-1, "Training rows to use, from the first; -1 = all.", AT_LEAST_1_OR_ALL)
    validation_rows: int = setting(-1, "Validation rows to use, from the first; -1 = all.", AT_LEAST_1_OR_ALL)
    test_rows: int = setting(-1, "Test questions to answer, from the first; -1 = all.", AT_LEAST_1_OR_ALL)
    dataloader_num_workers: int = setting(
        0, "Processes that read rows ahead, above all pictures; 0 = each batch is read when its step begins.", *HELD_0
    )
    partitions: int = setting(0, "Parts of the rows that ranks draw from; 0 = one each.", *HELD_0, SUMMARIZATION)


@dataclass(frozen=True)
class TrainingSettings:
    """What is trained, on what task, and by which steps."""

    _argument_group_name = "training"
    technique: str = setting(
        "lora", "Adapters (lora), those of a base in 4 bits (qlora), or the model's weights (full).", choices=TECHNIQUES
    )
    task: str = setting("chat", "What is learnt: answers, labels, summaries, or the better of two.", choices=TASKS)
    beta: float = setting(
        0.1,
        "With preferences: DPO's beta; lower = the model moves further. With rewards: weight of the divergence from "
        "the model before training; 0 = none.",
        AT_LEAST_0,
        LOG_PROBS,
    )
    exchange_answers: bool = setting(False, "With preferences: learn the rejected answers, as a control.", PREFERENCES)
    reward: str = setting(
        "", "With rewards: functions that score answers, as module:function, with commas between.", REWARDS
    )
    reward_weights: str = setting("", "With several rewards: their weights, with commas between; empty = 1.", REWARDS)
    num_generations: int = setting(8, "With rewards: answers to a prompt, which are compared.", AT_LEAST_2, REWARDS)
    num_iterations: int = setting(1, "With rewards: optimizer steps on the same answers.", *HELD_1, REWARDS)
    temperature: float = setting(1.0, "With rewards: temperature that answers are sampled at.", ABOVE_0, REWARDS)
    epsilon: float = setting(
        0.2, "With rewards: how far a token's ratio counts: 1 - epsilon to 1 + epsilon.", ABOVE_0, REWARDS
    )
    use_vllm: bool = setting(
        False,
        "With rewards, on GPUs: vLLM answers, beside training on the same GPU; answers then depend on their batch.",
        REWARDS,
        OnlyFor("GPUs", lambda run: run.device == "cuda"),
    )
    loss_type: Literal["auto", "sigmoid", "sft", "dapo", "grpo"] = setting(
        "auto",
        "With preferences: sigmoid (DPO; auto), or sft: the chosen answers alone. With rewards: mean over all tokens "
        "of a step (dapo; auto), or over those of each answer, and over answers (grpo).",
        LOG_PROBS,
    )
    loop: Literal["trainer", "accelerate", "machines"] = setting(
        "trainer", "With summarization: the Trainer, or a loop on Accelerate or torch.distributed.", SUMMARIZATION
    )
    per_device_train_batch_size: int = setting(
        16, "Training rows per rank and step, before accumulation.", *HELD_1, aliases=("--batch_size", "--batch-size")
    )
    padding_free: Literal["auto", "yes", "no"] = setting(
        "auto",
        "With messages: rows are packed without padding; auto = where attention can separate them.",
        OnlyFor("rows of messages, without pp, pictures and pairs",
                lambda run: run.goal.learns_answers and not run.parallelism.pipelines),
    )  # fmt: skip
    train_sampling_strategy: Literal["auto", "random", "group_by_length"] = setting(
        "auto", "Order of training rows: random, or by length in windows of 4 steps; auto = random with padding_free."
    )
    gradient_accumulation_steps: int = setting(1, "Micro-batches per optimizer step and rank.", *HELD_1)
    num_train_epochs: int = setting(6, "Passes over the training rows.", AT_LEAST_1)
    max_steps: int = setting(-1, "Optimizer steps after which training ends early; -1 = all epochs.", AT_LEAST_1_OR_ALL)
    learning_rate: float = setting(
        1e-3,
        "Peak learning rate, after warm-up and before scaling; -1 = by the model's width, as for conversations where "
        "another --model is passed and no rate.",
        ABOVE_0_OR_BY_MODEL,
    )
    learning_rate_scaling: Literal["none", "sqrt", "linear"] = setting(
        "none", "Growth of the learning rate with the ranks that share a step: none, by their square root, or linear."
    )
    warmup_steps: float = setting(
        0.03, "Steps in which the learning rate rises; below 1, their share of all steps.", AT_LEAST_0, STEPS_OR_SHARE
    )
    lr_scheduler_type: str = setting("cosine", "Schedule of the learning rate, by its name in Transformers.")
    optim: str = setting("adamw_torch_fused", "Optimizer, by its name in Transformers.", aliases=("--optimizer",))
    weight_decay: float = setting(0.01, "Weight decay, per step and unit of learning rate.", AT_LEAST_0)
    max_grad_norm: float = setting(0.3, "Gradient clipping: largest 2-norm of all gradients; 0 = off.", AT_LEAST_0)
    gradient_checkpointing: bool = setting(False, "Compute activations again in the backward pass: less memory.")
    use_reentrant: bool = setting(
        False,
        "With gradient_checkpointing: PyTorch's reentrant implementation instead of the newer one.",
        OnlyFor("gradient checkpointing", lambda run: run.gradient_checkpointing),
        OnlyFor("single and mp: elsewhere checkpointing is non-reentrant", lambda run: run.parallelism.in_one_process),
    )
    tiled_mlp: bool = setting(
        False,
        "MLPs compute tiles of tokens one by one, each again in the backward pass: less memory with long rows.",
        WHOLE_LAYERS,
        LEARNT_ANSWERS,
    )
    activation_offloading: bool = setting(
        False,
        "With gradient_checkpointing, on GPUs: the layers' inputs wait in the host's memory.",
        OnlyFor("gradient checkpointing on GPUs", lambda run: run.gradient_checkpointing and run.device == "cuda"),
        WHOLE_LAYERS,
        LEARNT_ANSWERS,
    )
    torch_compile: bool = setting(False, "Compile each layer: larger kernels, for some minutes at the start.")
    seed: int = setting(42, "Seed of the adapters' start, of dropout and of the rows' order.", AT_LEAST_0)


@dataclass(frozen=True)
class AdapterSettings:
    """What is trained beside or inside the model's layers."""

    _argument_group_name = "adapters"
    target_modules: str = setting(
        "all-linear",
        "Linear layers to adapt or train, with commas, or a regular expression that their whole names match; "
        "all-linear (but the head), or all (full).",
    )
    freeze_vision_tower: bool = setting(True, "With visual_questions: false = the tower is trained, too.", PICTURES)
    lora_r: int = setting(8, "Rank of the adapters.", *HELD_1, ADAPTERS, aliases=("--lora_rank", "--lora-rank"))
    lora_alpha: float = setting(64.0, "Adapters are multiplied by lora_alpha / sqrt(lora_r).", ABOVE_0, ADAPTERS)
    use_rslora: bool = setting(True, "false = adapters are multiplied by lora_alpha / lora_r instead.", ADAPTERS)
    lora_dropout: float = setting(0.1, "Dropout before the adapters (0 to 1).", FRACTION, ADAPTERS)
    trainable_token_indices: str = setting(
        "",
        "Numbers of tokens, with commas, whose embeddings are trained beside the adapters, as of new control tokens.",
        ADAPTERS,
        OnlyFor("single and ddp, without pairs of answers",
                lambda run: (run.parallelism.is_single or run.parallelism.replicates) and not run.goal.compares),
    )  # fmt: skip


@dataclass(frozen=True)
class ParallelismSettings:
    """On which devices, and how they share the work."""

    _argument_group_name = "parallelism"
    parallel: str = setting(
        "single",
        "How devices share the work: rows (ddp), layers (mp; pp: micro-batches in flight), matrices (tp), or rows with "
        "what each rank holds divided, too (fsdp: FSDP2; zero1 to zero3: DeepSpeed).",
        choices=PARALLELISMS,
    )
    device: Literal["cpu", "cuda"] = setting("cpu", "Kind of device: cpu = one process with `threads` threads.")
    threads: int = setting(1, "On CPU: threads of each device; only runs with 1 are compared.", *HELD_1, ON_CPU)
    gpu: str = setting("", "GPU that the run folder was made for, by its name in the catalogue; empty on CPU.")
    devices: int = setting(1, "Number of devices, and so of ranks except with single and mp.", *HELD_1)
    nodes: int = setting(1, "Machines that share the devices, each with its torchrun.", *HELD_1, SEVERAL_RANKS)
    stages: int = setting(0, "With mp: parts that the layers are divided into; 0 = one per device.", *HELD_0, MP_AND_PP)
    device_map: str = setting(
        "balanced", "With mp and pp: balanced (lowest peak), even, auto (Accelerate's, mp), or a JSON file.", MP_AND_PP
    )
    schedule: Literal["1f1b", "gpipe"] = setting("1f1b", "With pp: the order of the micro-batches' passes.", PP)
    micro_batches: int = setting(1, "With pp: equal parts of a batch, in flight at the same time.", *HELD_1, PP)
    dp_replicate_size: int = setting(
        1,
        "With fsdp: copies of the model, each sharded by an equal group of ranks (hybrid sharding, HSDP).",
        *HELD_1,
        OnlyFor("fsdp (2.6)", lambda run: run.parallelism.uses_fsdp),
    )
    sp_size: int = setting(
        1,
        "With ddp and fsdp: ranks that share the tokens of each row (sequence parallel); 1 = each has its own rows.",
        *HELD_1,
        OnlyFor("ddp and fsdp (2.8)", lambda run: run.parallelism.shares_rows),
        LEARNT_ANSWERS,
        aliases=("--sp",),
    )
    offload: Literal["none", "cpu"] = setting(
        "none",
        "With fsdp and zero: cpu = shards wait in the host's memory (zero1, zero2: optimizer states alone).",
        OnlyFor("fsdp and zero (2.6)", lambda run: bool(run.parallelism.shards)),
        nargs="?",
        const="cpu",
    )
    gradient_exchange: Literal["after", "overlapped", "overlapped-bf16"] = setting(
        "after",
        "With loop machines, gradients are averaged after the backward pass, overlapped with it, or so, sent as bf16.",
        MACHINES_LOOP,
    )
    bucket_cap_mb: float = setting(25.0, "With loop machines: MiB of gradients sent at once.", ABOVE_0, MACHINES_LOOP)
    link: str = setting(
        "",
        "What joins the machines: on GPUs for the plan, such as ethernet-25 (Gbit/s); on CPUs for the record.",
        OnlyFor("several machines (nodes)", lambda run: run.nodes > 1),
    )
    start_timeout_s: float = setting(300.0, "Seconds that ranks wait for each other at their start.", SECONDS)
    step_timeout_s: float = setting(600.0, "Seconds of a step; ten times as many of a validation or save.", SECONDS)


@dataclass(frozen=True)
class EvaluationSettings:
    """How often the model is validated and saved, and how it is judged."""

    _argument_group_name = "evaluation"
    eval_steps: float = setting(0.05, "Steps (below 1: share) between validations.", ABOVE_0, STEPS_OR_SHARE)
    save_steps: float = setting(
        0.0,
        "Steps (below 1: share of all) between full states, with one at the end; 0 = by max_lost_minutes, and at the "
        "end if at most 1 GiB.",
        AT_LEAST_0,
        STEPS_OR_SHARE,
    )
    max_lost_minutes: float = setting(
        15.0,
        "Without save_steps: minutes of training that a failure may lose.",
        ABOVE_0,
        OnlyFor("runs without save_steps", lambda run: not run.save_steps),
    )
    pause_at_step: int = setting(
        0, "Step after which a full state is saved and the run ends, to be resumed later; 0 = none.", AT_LEAST_0
    )
    early_stopping_patience: int = setting(0, "Validations without gain that end training; 0 = never.", AT_LEAST_0)
    per_device_eval_batch_size: int = setting(
        0, f"Rows that a rank validates or answers at once; 0 = by the plan, at most {MOST_EVALUATED_AT_ONCE}.", *HELD_0
    )
    max_new_tokens: int = setting(48, "Longest generated answer, in tokens.", AT_LEAST_1)
    num_beams: int = setting(4, "With summarization: beams of the search; 1 = greedy.", *HELD_1, SUMMARIZATION)
    baseline: Literal["base", "none"] = setting(
        "base",
        "Evaluate the base before training, which takes minutes with a large model; none = do not.",
        OnlyFor("tasks without pairs of answers, whose rewards compare with what the base finds of them",
                lambda run: not run.goal.compares),
    )  # fmt: skip
    forgetting_data: str = setting(
        "",
        "File or folder of other texts or conversations, whose loss before and after tells what was forgotten; empty "
        "= those in assets/general; none = do not measure it.",
        OnlyFor("rows of messages without pictures, of pretrained weights, with a baseline",
                lambda run: run.goal.chats and ((run.weights == "pretrained" and run.baseline != "none")
                                                         or run.forgetting_data == "none")),
    )  # fmt: skip
    independent_judge: Literal["minilm", "none"] = setting(
        "minilm", "A second judge of the answers: the sentence encoder all-MiniLM-L6-v2 (extra `judge`), or none."
    )

    @property
    def rows_evaluated_at_once(self) -> int:
        """Rows that a rank validates or answers at once; as many as a plan may choose, where none has chosen yet."""
        return self.per_device_eval_batch_size or MOST_EVALUATED_AT_ONCE


@dataclass(frozen=True)
class TrackingSettings:
    """Where results go, and how they are reported."""

    _argument_group_name = "tracking"
    run_folder: str = setting("", "Run folder, relative to the repository's root.")
    run_name: str = setting("", "Name of the results folder; empty = launcher, what tells runs apart, and seed.")
    results_root: str = setting("", "Folder that takes results/<run name>; empty = the run folder.")
    resume_from_checkpoint: str = setting("", "Checkpoint to resume from; last = this run's newest, or the beginning.")
    report_to: str = setting("tensorboard", "Trackers by their names in Transformers, with commas between, or none.")
    log_format: Literal["text", "json"] = setting(
        "text", "How metrics are printed while training: for readers, or as JSON lines, which Valohai plots."
    )
    log_level: Literal["info", "warning"] = setting("info", "What a run prints: all, or only what goes wrong.")


GROUPS = (
    ModelSettings, DataSettings, TrainingSettings, AdapterSettings, ParallelismSettings, EvaluationSettings,
    TrackingSettings,
)  # fmt: skip

# by setting: the ranges of its values, and the runs that it means something for
LIMITS = {each.name: _LIMITS_OF[each] for group in GROUPS for each in fields(group)}
