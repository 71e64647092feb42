"""Save a trained model or adapter, load it again as any user would, and compare the logits."""

from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.data.answer_ends import save_stops
from common.data.batches import within_budget
from common.data.rows import Tokens, first_tokens
from common.models.answering import answering_run, answering_stages, load_answering
from common.models.loading import save_tokenizer
from common.models.merging import (
    check_equal_logits,
    comparing,
    merge_need,
    reloaded_difference,
    save_merged,
    tokens_at_once,
    why_not_merged,
)
from common.models.saved_files import wait_for_parts
from common.runtime.disks import broadcast_folder
from common.runtime.recorder import RunRecorder
from common.training.loop import TrainingLoop
from common.training.results import resting

DeviceMap = dict[str, str | int]


def save(
    log: RunRecorder, loop: TrainingLoop, tokenizer: PreTrainedTokenizerBase, device_map: DeviceMap | None = None
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the model (with LoRA the adapter, and the merged model), load it as any user would, and compare the logits.

    The results folder gets `model`, or `adapter` and where there is room `merged`, on each disk and with the tokenizer.
    The trained model is freed on the way, so that a device holds at most two models. Called on every rank.

    Returns:
        What was saved, loaded to answer by `device_map` or as `load_answering` does, and the largest absolute
        differences of logits from the trained one's. Without a merged model it is the base with the adapter's layers.
    """
    with log.phase("save and reload"):
        run, load = answering_run(log.run), partial(load_answering, log.run, log.rank, device_map=device_map)
        saved = [log.folder / ("adapter" if run.method.has_adapters else "model")]
        batch, expected, compares = save_and_free(loop, saved[0])
        differences: dict[str, float | None] = {}
        merged_answers = not run.method.has_adapters
        if run.method.has_adapters:
            stages = 1 if device_map else answering_stages(run)
            if compares or stages > 1:
                differences["adapter"] = reloaded_difference(run, saved[0], load, batch, expected, log.memory)
            why_not = why_not_merged(gather_object([merge_need(run, log.rank, stages, log.folder)]))
            if not why_not:
                saved.append(log.folder / "merged")
                answers = save_merged(run, log.rank, saved[0], load, saved[1]) if log.rank.rank < stages else True
                if log.rank.rank >= stages > 1:  # of another group
                    wait_for_parts()
                merged_answers = all(gather_object([answers]))
            elif log.rank.is_main:
                print(f"note: {why_not}")
        if log.rank.is_main:
            for each in saved:
                save_tokenizer(tokenizer, each)
                if run.goal.converses:
                    save_stops(each, tokenizer, getattr(loop.model, "generation_config", None))
        wait_for_everyone()
        for each in saved:
            broadcast_folder(each, source=0, lacks=log.writes and not log.rank.is_main)
        if not merged_answers:
            tuned = PeftModel.from_pretrained(load(), saved[0]).get_base_model().eval()
        else:
            tuned = load(source=saved[-1])
            with comparing(tuned, expected, log.memory):
                what = "merged model" if run.method.has_adapters else "model"
                differences[saved[-1].name] = check_equal_logits(expected, tuned, batch, what, run.precision)
        of_ranks = gather_object([{name: value for name, value in differences.items() if value is not None}])
        return tuned, {name: value for of_rank in reversed(of_ranks) for name, value in of_rank.items()}


def save_and_free(loop: TrainingLoop, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, bool]:
    """Save the trained model or adapter in `folder`, and free the loop's memory; called on every rank.

    Returns:
        Validation rows as a batch; the trained model's logits of it, fp32, shape (rows, tokens, vocabulary), None on
        ranks that do not know them; and whether this rank is the first that does.
    """
    batch = loop.collated(rows_to_compare(loop))
    with loop.log.memory.counting("merging", resting(loop)):
        expected = loop.part.logits(batch)
    loop.part.export(folder)
    if loop.rank.is_main:
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's: an empty card, with the base's path on this machine
    loop.free()
    wait_for_everyone()
    first = gather_object([expected is not None]).index(True)
    return batch, expected, loop.rank.rank == first


def rows_to_compare(loop: TrainingLoop) -> list[Tokens]:
    """Return the first validation rows, as many as have no more logits than a chunk of the loss; a longer one is cut.

    Logits are compared at all positions: those of a whole batch could take more memory than training did.
    """
    goal, most = loop.run.goal, tokens_at_once(loop.model)
    rows = list(islice(loop.validation_rows, loop.args.per_device_eval_batch_size))  # the others may be on disk
    if goal.chats:  # what precedes a token decides on its logits; a picture stays whole
        rows = [first_tokens(row, most) for row in rows]
    tokens = [len(row["labels"] if goal.summarizes else row["input_ids"]) for row in rows]
    return [rows[place] for place in within_budget(tokens, most)[0]]
