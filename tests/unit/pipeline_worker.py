"""Toy models, whole and cut into stages, on every rank: losses, gradients, logits and what is saved. Run by torchrun.

torchrun --nproc_per_node STAGES pipeline_worker.py FOLDER STAGES CASE...: what each stage finds of each case.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.models import chunked_loss
from common.models.loading import load_base_model
from common.models.saved_files import save_parts
from common.models.stages import Sharing, StageMap, add_lora_to_stage, load_stage
from common.models.trained_weights import add_lora
from common.planning.architectures import as_classifier, read_architecture
from common.planning.device_maps import device_map_of
from common.planning.shares import Share
from common.runtime.rank import start_rank
from common.runtime.world import Rank
from common.training.answer_logits import Batch, keep_answer_logits
from common.training.pipeline import Pipeline
from common.training.pipeline_parallel import Stage, sum_of_first_and_last
from tests.unit.ranks import gradients_of, largest, tell

LAYERS, ROWS, LENGTH, VOCABULARY = 5, 8, 12, 96
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
HEADS = {kind: {"head_dim": 8} for kind in ("Qwen3", "Gemma3Text", "Ministral3")}  # others divide their hidden state
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODERS = ("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Olmo2", "Phi3", "Gemma3Text", "Ministral3")
Differences = dict[str, float]


def cases() -> dict[str, dict[str, object]]:
    """Every model, tied or not, and every way to run it."""
    found = {
        f"{kind}, {'tied' if tied else 'untied'}, {schedule}": {"kind": kind, "tied": tied, "schedule": schedule}
        for kind in DECODERS
        for tied in (False, True)
        for schedule in ("1f1b", "gpipe")
        if kind == "Llama" or schedule == "1f1b"
    }
    encoder, llama = {"kind": "Roberta", "tied": False}, {"kind": "Llama", "schedule": "1f1b", "tied": True}
    return {
        **found,
        "Roberta, 1f1b": {**encoder, "schedule": "1f1b"},
        "Roberta, gpipe": {**encoder, "schedule": "gpipe"},
        "Llama, tied, recomputed": {**llama, "recomputed": True},
        "Llama, tied, adapters": {**llama, "technique": "lora"},
        "Llama, untied, adapters": {**llama, "tied": False, "technique": "lora"},
        "Llama, tied, adapters on q_proj": {**llama, "technique": "lora", "targets": "q_proj"},
        "Llama, tied, random": {**llama, "weights": "random"},
    }


def save_toy(folder: Path, kind: str, tied: bool, vocabulary: int = VOCABULARY, **more: object) -> None:
    torch.manual_seed(0)
    of_kind = {"num_key_value_heads": 2, "tie_word_embeddings": tied, **HEADS.get(kind, {})}
    auto_class = transformers.AutoModelForCausalLM
    if kind == "Roberta":
        of_kind = {"num_labels": 3, "max_position_embeddings": 40, **NO_DROPOUT}
        auto_class = transformers.AutoModelForSequenceClassification
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "vocab_size": vocabulary}, **of_kind, **more)
    auto_class.from_config(config).save_pretrained(folder)


def make_batch(kind: str) -> dict[str, torch.Tensor]:
    """Rows of uneven lengths, padded on the right, with uneven numbers of labels; one row has none."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    mask, labels = torch.ones_like(ids), ids.clone()
    for row, length in enumerate((12, 5, 9, 12, 3, 7, 12, 8)):
        mask[row, length:], ids[row, length:], labels[row, length:] = 0, 1, IGNORED_LABEL
        labels[row, : LENGTH if row == 6 else row % 4] = IGNORED_LABEL
    if kind == "Roberta":
        labels = torch.tensor([0, 2, 1, 1, 0, IGNORED_LABEL, 2, 0])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def whole_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the losses of all labels."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    if labels.dim() == 2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def stage_map_of(folder: Path, stages: int) -> StageMap:
    """Uneven stages: the last ones have what is over."""
    starts = [LAYERS * stage // stages for stage in range(stages + 1)]
    shares = [Share((starts[stage + 1] - starts[stage],), stage == 0, stage == stages - 1) for stage in range(stages)]
    architecture = read_architecture(str(folder))
    if architecture.model_type == "roberta":
        architecture = as_classifier(architecture, 2)
    return device_map_of(architecture, shares, range(stages))


def compare(case: dict[str, object], folder: Path, rank: Rank) -> Differences:
    kind, is_lora = case["kind"], case.get("technique") == "lora"
    if rank.is_main:
        save_toy(folder, kind, case["tied"], 2048 if "weights" in case else VOCABULARY)
    wait_for_everyone()
    run = RunConfig(
        technique=case.get("technique", "full"),
        parallel="pp",
        devices=rank.world_size,
        per_device_train_batch_size=ROWS,
        micro_batches=4,
        schedule=case["schedule"],
        model=str(folder),
        weights=case.get("weights", "pretrained"),
        target_modules=case.get("targets", "all-linear"),
        **({"lora_dropout": 0.0, "lora_r": 2} if is_lora else {}),
    )
    batch, stage_map = make_batch(kind), stage_map_of(folder, rank.world_size)
    told = batch if kind == "Roberta" else keep_answer_logits(batch)
    whole, stage = to_be_trained(run, kind, stage_map, rank)
    if "recomputed" in case:
        stage.gradient_checkpointing_enable({"use_reentrant": False})
    pipeline = Pipeline(stage, run, rank)
    saved = folder.with_name(folder.name + "-saved")
    every = set().union(*gather_object([set(trained_of(stage))]))
    save_parts(stage, saved, Sharing(rank.rank, rank.world_size, group=0, groups=1))
    return {
        "saved": saved_difference(saved, run, whole),
        **forward_differences(pipeline, whole, batch, told),
        **gradient_differences(pipeline, whole, batch, told, case["tied"] and not is_lora),
        "counts": wrong_counts(pipeline, whole, case["tied"]),
        "missing names": len((every ^ trained_of(whole).keys()) - {"lm_head.weight"}),
        "weights on this stage": len(dict(stage.named_parameters())) / len(dict(whole.named_parameters())),
    }


def to_be_trained(
    run: RunConfig, kind: str, stage_map: StageMap, rank: Rank
) -> tuple[torch.nn.Module, torch.nn.Module]:
    whole, stage = load_whole(run, kind), load_stage(run, stage_map, rank.rank, rank.device)
    if run.technique == "full":
        return whole.requires_grad_(True), stage.requires_grad_(True)
    torch.manual_seed(1)
    whole = add_lora(whole, run)
    torch.manual_seed(1)
    stage = add_lora_to_stage(stage, run, stage_map, rank.rank)
    for name, weight in [*whole.named_parameters(), *stage.named_parameters()]:
        if "lora_B" in name:  # else half of the gradients would be zero
            torch.nn.init.constant_(weight, 0.01)
    return whole, stage


def trained_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def load_whole(run: RunConfig, kind: str) -> PreTrainedModel:
    if kind == "Roberta":
        return transformers.RobertaForSequenceClassification.from_pretrained(run.model).eval()
    return load_base_model(run, {"": "cpu"})


def forward_differences(pipeline: Pipeline, whole: torch.nn.Module, batch: Batch, told: Batch) -> Differences:
    """Of the validation loss and of all logits, on the last stage; `told` is the batch as a trainer has it."""
    with torch.no_grad():
        loss = whole_loss(whole, batch).item()
        logits = whole(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    validated, made = pipeline.validate(told).item(), pipeline.logits(told)
    if not pipeline.is_last:
        return {"validation loss": float(made is not None), "logits": validated}
    return {
        "validation loss": abs(validated / loss - 1),
        "logits": (made - logits).abs().max().item() / logits.abs().max().item(),
    }


def gradient_differences(
    pipeline: Pipeline, whole: torch.nn.Module, batch: Batch, told: Batch, tied: bool
) -> Differences:
    """Of the training loss and the gradients of this stage, over those of the whole model."""
    divisor, module, found = 17.0, pipeline, {}
    loss = whole_loss(whole, batch) / divisor
    loss.backward()
    trained = pipeline.train_step(told, divisor).item()
    if tied and (module.is_first or module.is_last):
        weight, expected = module.causal.get_input_embeddings().weight, whole.get_input_embeddings().weight.grad
        found["without the other end's gradient"] = (weight.grad - expected).abs().max().item()
        weight.grad = sum_of_first_and_last(weight.grad, pipeline.rank)
    gradients = gradients_of(module.model)
    found["gradients"] = largest(gradients_of(whole), gradients)
    found["training loss"] = abs(trained / loss.item() - 1) if module.is_last else trained
    found["largest gradient"] = max(gradient.abs().max().item() for gradient in gradients.values())
    found["without a gradient"] = len(trained_of(module.model).keys() - gradients.keys())
    # Another step adds as much again; the passes alone add something of their own, and send nothing.
    pipeline.train_step(told, divisor, "gpipe", 2)
    doubled = gradients_of(module.model)
    if not tied:
        found["a second step"] = largest({name: 2 * each for name, each in gradients.items()}, doubled)
    pipeline.bare_step(told, 4)
    found["passes alone"] = largest(doubled, gradients_of(module.model))
    return found


def wrong_counts(pipeline: Pipeline, whole: torch.nn.Module, tied: bool) -> int:
    """How far trained and multiplied weights, as they are counted over all stages, are from the whole's."""
    part = SimpleNamespace(pipeline=pipeline, rank=pipeline.rank, model=pipeline.model)
    trained, multiplied = Stage.parameter_counts(part)
    looked_up = 0 if tied else whole.get_input_embeddings().weight.numel()
    expected = sum(weight.numel() for weight in whole.parameters()) - looked_up
    return abs(trained - sum(weight.numel() for weight in trained_of(whole).values())) + abs(multiplied - expected)


def saved_difference(saved: Path, run: RunConfig, whole: torch.nn.Module) -> float:
    """Of what plain libraries load and the whole model."""
    if isinstance(whole, PeftModel):
        plain = PeftModel.from_pretrained(load_base_model(run, {"": "cpu"}), saved)
    else:
        plain = type(whole).from_pretrained(saved)
    return largest(plain.state_dict(), whole.state_dict())


def main() -> None:
    folder, stages, *names = sys.argv[1:]
    rank = start_rank(RunConfig(parallel="pp", devices=int(stages), per_device_train_batch_size=ROWS, micro_batches=4))
    chunked_loss.LOGITS_AT_ONCE = 10 * VOCABULARY  # several chunks in each micro-batch
    tell({name: compare(cases()[name], Path(folder, str(number)), rank) for number, name in enumerate(names)})


if __name__ == "__main__":
    main()
