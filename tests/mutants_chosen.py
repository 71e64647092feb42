"""The chosen faults of `tests.mutants`: each breaks one promise, and names the tests that have to see it.

A fault stands in its file exactly once (`before`); who redesigns that place moves the fault along.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change for the worse, and who has to see it."""

    promise: str
    """What goes wrong, in words; the name of the fault."""
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    """The cheapest first."""
    kind: str = ""
    """Of a drawn fault: what was changed. Empty: it was chosen."""
    needs: str = ""
    """A package without which its tests are skipped."""

    def applied_to(self, text: str) -> str:
        """The file's text with the fault."""
        return text.replace(self.before, self.after)


def _unit(name: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py::test_{test}" for test in tests)


def _faults(name: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"tests/faults/test_{name}.py::test_{test}" for test in tests)


def _recipes(name: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"tests/recipes/test_{name}.py::test_{test}" for test in tests)


GOLDEN = _recipes("golden_losses", "the_first_losses_are_the_golden_ones[LoRA]")
BEST_OF_ONE_DEVICE = _recipes("equivalence", "one_devices_steps_are_fit_to_compare_with[one device, full]")


def _equals_one_device(case: str) -> tuple[str, ...]:
    """A case of the matrix of equal steps."""
    return _recipes("equivalence", f"five_sgd_steps_are_one_devices[{case}]")


DATA = (
    Fault(
        "a row is dropped: the last step of an epoch, which is not full",
        "common/data/batches.py",
        "        if in_full_steps < max(map(len, orders)):\n",
        "        if in_full_steps > max(map(len, orders)):\n",
        _unit("data", "every_row_is_drawn_once_per_epoch_whatever_the_world"),
    ),
    Fault(
        "a row is seen twice: two ranks take the same share",
        "common/data/batches.py",
        "there, back = self.rank, 2 * self.world_size - 1 - self.rank",
        "there, back = max(0, self.rank - 1), 2 * self.world_size - 1 - max(0, self.rank - 1)",
        _unit("data", "every_row_is_drawn_once_per_epoch_whatever_the_world"),
    ),
    Fault(
        "rows that are used twice, or never, pass the check after training",
        "common/training/results.py",
        "    if times_used.total() != row_uses:\n",
        "    if times_used.total() < 0:\n",
        _unit("training", "rows_skipped_or_repeated_are_refused"),
    ),
    Fault(
        "the order of the rows is the same in every epoch",
        "common/data/batches.py",
        "[[part[n] for n in torch.randperm(len(part), generator=generator).tolist()] for part in self.parts]",
        "[list(part) for part in self.parts]",
        _unit("data", "epochs_and_seeds_change_the_order", "batches_hold_rows_of_like_lengths_in_random_order"),
    ),
    Fault(
        "the question is learnt, too",
        "common/data/templates.py",
        "labels = [token if is_learnt else IGNORED_LABEL for token, is_learnt in zip(ids, learnt, strict=True)]",
        "labels = list(ids)",
        _unit("data", "what_is_learnt_of_a_row_with_several_turns"),
    ),
    Fault(
        "what a chat template drops is never learnt, and nobody is told",
        "common/data/templates.py",
        "for says in _said(message) if says not in text]",
        "for says in _said(message) if not text]",
        _unit("formats", "a_template_that_drops_a_turn_is_refused"),
    ),
    Fault(
        "Alpaca's input is not in the question",
        "common/data/formats.py",
        """(row["instruction"], row.get("input"))""",
        """(row["instruction"], None)""",
        _unit("formats", "every_format_is_read_from_a_file_and_from_a_folder"),
    ),
    Fault(
        "padding is learnt",
        "common/data/batches.py",
        '"label_pad_token_id": IGNORED_LABEL',
        '"label_pad_token_id": tokenizer.pad_token_id',
        _unit("data", "batches_are_as_long_as_is_planned_for_them"),
    ),
    Fault(
        "rows packed without padding see each other",
        "common/models/separate_rows.py",
        "    if cu_seq_lens_q is None:\n",
        "    if True:\n",
        _unit("separate_rows", "a_row_is_computed_as_if_it_were_alone_and_no_other_sees_it"),
    ),
    Fault(
        "a window of attention is forgotten where rows are packed without padding",
        "common/models/separate_rows.py",
        "    if size is None or length <= size:\n",
        "    if True:\n",
        _unit("separate_rows", "a_window_of_attention_reaches_no_further_than_it"),
    ),
    Fault(
        "padding is counted among the tokens of a run",
        "common/training/callbacks.py",
        "int(mask[is_row.repeat(len(mask) // len(is_row))].sum())",
        "mask[is_row.repeat(len(mask) // len(is_row))].numel()",
        _unit("callbacks", "rows_that_fill_a_batch_up_are_no_work"),
    ),
    Fault(
        "rows that are held out for the test are trained on as well",
        "common/data/splits.py",
        "            taken = order.pop(0)\n",
        "            taken = order[0]\n",
        _unit("data", "of_one_file_a_tenth_each_is_held_out_and_always_the_same_rows"),
    ),
    Fault(
        "a test row among the training rows is not noticed",
        "common/data/row_checks.py",
        "    if not shared:\n        return splits\n",
        "    return splits\n",
        _faults("bad_input", "a_test_row_that_is_learnt_is_refused_whatever_its_case_and_spacing"),
    ),
    Fault(
        "an id that stands twice is not noticed",
        "common/data/row_checks.py",
        'first.setdefault(str(row["id"]), number) != number',
        'first.setdefault(str(row["id"]), number) > number',
        _faults("bad_input", "an_id_that_stands_twice_is_refused"),
    ),
    Fault(
        "parts of the rows, one for each machine, leave rows out",
        "common/data/batches.py",
        "return [order[part::parts] for part in range(parts)]",
        "return [order[part::parts][: row_count // parts] for part in range(parts)]",
        _unit("data", "partitions_are_shuffled_of_equal_sizes_and_follow_from_the_seed"),
    ),
    Fault(
        "classes are numbered in the order of the rows, another one for each file",
        "common/data/texts.py",
        '    labels = sorted({row["label"] for row in splits.train})\n',
        '    return list({row["label"] for row in splits.train})\n',
        _unit("labelled_data", "labels_that_are_numbers_are_texts_in_the_order_of_numbers"),
    ),
)

LOSS = (
    Fault(
        "of several chunks of the loss only the last one's gradient reaches the head",
        "common/models/chunked_loss.py",
        "    return [before.add_(gradient) for before, gradient in zip(of_trained, gradients[1:], strict=True)]\n",
        "    return list(gradients[1:])\n",
        _unit("chunked_loss", "loss_and_gradients_are_those_of_whole_logits[untied-10]"),
    ),
    Fault(
        "gradients of a loss in chunks are not divided by the step's tokens",
        "common/models/chunked_loss.py",
        "gradient.mul_(of_loss.to(gradient.device)).to(dtype)",
        "gradient.to(dtype)",
        _unit("chunked_loss", "loss_and_gradients_are_those_of_whole_logits[tied-1000]"),
    ),
    Fault(
        "the loss is averaged per rank, not over the tokens of all",
        "common/training/loop.py",
        "label_count = sum(self.objective.labels_in(self.train_rows[row]) for row in rows)",
        "own_rows = [row for batch in batches for row in batch]\n"
        "            label_count = sum(self.objective.labels_in(self.train_rows[row]) for row in own_rows)\n"
        "            label_count *= self.batches.world_size",
        _equals_one_device("DDP, lora"),
    ),
    Fault(
        "a summary's loss is averaged per share, not over the whole step",
        "common/tasks/objectives.py",
        "    return losses / divisor\n",
        "    return losses / (labels != IGNORED_LABEL).sum()\n",
        _unit("summarization", "losses_of_uneven_shares_add_up_to_the_whole_batchs_mean"),
    ),
    Fault(
        "a classifier's loss is averaged per share, not over the whole step",
        "common/tasks/objectives.py",
        'cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")\n',
        'cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="mean")\n',
        _unit("classification", "losses_of_uneven_shares_add_up_to_the_mean_of_the_whole"),
    ),
    Fault(
        "logits are left out where only some rows of a batch have a label",
        "common/training/answer_logits.py",
        "positions = (targets != IGNORED_LABEL).any(0)",
        "positions = (targets != IGNORED_LABEL).all(0)",
        GOLDEN,
    ),
    Fault(
        "the validation loss is divided by rows, not by tokens",
        "common/tasks/objectives.py",
        "    return torch.stack([torch.stack(losses), (targets != IGNORED_LABEL).sum(1)], dim=1)\n",
        "    return torch.stack([torch.stack(losses), (targets != IGNORED_LABEL).any(1).float()], dim=1)\n",
        _unit("training", "validation_computes_logits_at_answers_alone_and_the_same_loss"),
    ),
    Fault(
        "a row that fills a batch up counts in the accuracy",
        "common/tasks/classification.py",
        "has_label = labels != IGNORED_LABEL",
        "has_label = torch.ones_like(labels, dtype=torch.bool)",
        _unit("classification", "a_row_without_a_label_counts_nowhere"),
    ),
    Fault(
        "accumulation is left out: each micro-batch is a step",
        "common/training/loop.py",
        "            1 if run.goal.rewards else run.gradient_accumulation_steps,\n",
        "            1,\n",
        _equals_one_device("DDP, accumulated, lora"),
    ),
    Fault(
        "a learning rate that is to grow with the ranks does not",
        "common/base/run_config.py",
        '"linear": self.data_parallel_ranks}',
        '"linear": 1}',
        _unit("run_config", "the_learning_rate_grows_with_the_ranks_as_asked"),
    ),
    Fault(
        "the scheduler is stepped twice for each step",
        "common/training/loop.py",
        "            self.schedule.step()\n        self.state.global_step += 1\n",
        "            self.schedule.step()\n            self.schedule.step()\n        self.state.global_step += 1\n",
        GOLDEN,
    ),
    Fault(
        "an early stop waits for one validation more",
        "common/training/loop.py",
        "EarlyStoppingCallback(run.early_stopping_patience)",
        "EarlyStoppingCallback(run.early_stopping_patience + 1)",
        _unit("training", "training_ends_after_validations_without_a_better_model"),
    ),
    Fault(
        "the best checkpoint is the one with the worst loss",
        "common/training/optimizers.py",
        "greater_is_better=objective_of(run).higher_is_better,",
        "greater_is_better=not objective_of(run).higher_is_better,",
        BEST_OF_ONE_DEVICE,
    ),
)

SEVERAL_RANKS = (
    Fault(
        "hybrid sharding: copies sum gradients after the wrong micro-batch",
        "2.6_full_finetuning_with_fsdp/run_0_cpu_x2/my_workflow_full_finetuning_with_fsdp.py",
        "model.set_requires_all_reduce(is_last)",
        "model.set_requires_all_reduce(not is_last)",
        _equals_one_device("FSDP2, hybrid, accumulated, full"),
    ),
    Fault(
        "FSDP: each rank clips by the norm of its own shards",
        "common/training/fsdp.py",
        "clip_divided(gradients, gradients, [], max_norm, self.rank.device, group)",
        "clip_divided(gradients, [], gradients, max_norm, self.rank.device, group)",
        _equals_one_device("FSDP2, full"),
    ),
    Fault(
        "Hybrid sharding: the norm counts every copy's gradients",
        "common/training/fsdp.py",
        "clip_divided(gradients, gradients, [], max_norm, self.rank.device, group)",
        "clip_divided(gradients, gradients, [], max_norm, self.rank.device)",
        _equals_one_device("FSDP2, hybrid, full"),
    ),
    Fault(
        "Hybrid sharding: the rings between machines are planned as if each had a network of its own",
        "common/planning/time_plan.py",
        "rings * between_copies / (link",
        "between_copies / (link",
        _unit("time_plan", "hybrid_sharding_gathers_by_the_link_in_a_machine_and_its_rings_share_the_network"),
    ),
    Fault(
        "FSDP: gradients are divided by the ranks once too often",
        "2.6_full_finetuning_with_fsdp/run_0_cpu_x2/my_workflow_full_finetuning_with_fsdp.py",
        "(loss * log.rank.world_size).backward()  # FSDP takes the mean",
        "loss.backward()  # FSDP takes the mean",
        _equals_one_device("FSDP2, full"),
    ),
    Fault(
        "DDP by hand: gradients are divided by the ranks once too often",
        "2.2_lora_finetuning_with_ddp/run_0_cpu_x2/my_workflow_lora_finetuning_with_ddp.py",
        "(loss * log.rank.world_size).backward()  # DDP divides",
        "loss.backward()  # DDP divides",
        _equals_one_device("DDP, lora"),
    ),
    Fault(
        "FSDP: one shard of the trained model is not gathered",
        "common/models/shards.py",
        "    for owner, place in enumerate(places):\n",
        "    for owner, place in list(enumerate(places))[:-1]:\n",
        _equals_one_device("FSDP2, full"),
    ),
    Fault(
        "DDP by hand: gradients stay on their own rank",
        "common/training/ddp.py",
        "isinstance(replica, DistributedDataParallel) and not is_last else",
        "isinstance(replica, DistributedDataParallel) else",
        _equals_one_device("DDP, full"),
    ),
    Fault(
        "a model that is whole on every rank passes for a sharded one",
        "common/training/fsdp.py",
        "    if whole:\n        raise RuntimeError(\n",
        "    if not weights:\n        raise RuntimeError(\n",
        _unit("sharding", "a_whole_model_is_no_sharded_one"),
    ),
    Fault(
        "ZeRO: gradients are divided by the ranks once too often",
        "2.6_full_finetuning_with_fsdp/run_0_cpu_x2/my_workflow_full_finetuning_with_fsdp.py",
        "engine.backward(loss * log.rank.world_size, scale_wrt_gas=False)",
        "engine.backward(loss, scale_wrt_gas=False)",
        _equals_one_device("ZeRO-1, full"),
        needs="deepspeed",
    ),
    Fault(
        "ZeRO: DeepSpeed does not clip",
        "common/training/deepspeed_config.py",
        '"gradient_clipping": run.max_grad_norm,',
        '"gradient_clipping": 0.0,',
        _unit("sharding", "deepspeed_is_told_the_stage_and_the_run_s_own_settings"),
    ),
    Fault(
        "pipeline: a stage is skipped, as its layers are taken for another's",
        "common/models/stages.py",
        "if holder != stage and not is_shared:",
        "if holder != 0 and not is_shared:",
        _unit("pipeline", "cutting_keeps_names_and_values_of_what_stays"),
    ),
    Fault(
        "pipeline: each micro-batch weighs the same, however many tokens it has",
        "common/training/pipeline.py",
        "return losses / self.loss_divisor",
        "return losses / (target != -100).sum()",
        _unit("pipeline", "stages_compute_what_the_whole_model_computes"),
    ),
    Fault(
        "pipeline: 1F1B is GPipe",
        "common/training/pipeline.py",
        '{"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}',
        '{"1f1b": ScheduleGPipe, "gpipe": ScheduleGPipe}',
        _unit("dry_run", "a_stage_holds_what_its_schedule_has_in_flight"),
    ),
    Fault(
        "pipeline: rows that fill a batch up are learnt, and counted, twice",
        "common/training/pipeline_parallel.py",
        "[without_labels(rows[-1])] * missing",
        "[rows[-1]] * missing",
        _unit("pipeline", "a_batch_is_filled_up_with_rows_without_labels"),
    ),
    Fault(
        "pipeline: the two copies of tied embeddings go apart",
        "common/training/pipeline_parallel.py",
        "            tied.grad = sum_of_first_and_last(tied.grad, self.rank)\n",
        "            pass\n",
        _equals_one_device("PP, 1F1B, full, every weight"),
    ),
    Fault(
        "pipeline: each stage clips by the norm of its own gradients",
        "common/training/pipeline_parallel.py",
        "clip_divided(self.gradients(), counted, [], max_norm, self.rank.device)",
        "clip_divided(self.gradients(), [], counted, max_norm, self.rank.device)",
        _equals_one_device("PP, 1F1B, full"),
    ),
    Fault(
        "pipeline: one stage's adapters are not saved",
        "common/models/saved_files.py",
        "for part in parts for name, weight in part.items()}",
        "for part in parts[:1] for name, weight in part.items()}",
        _unit("pipeline", "stages_are_saved_as_one_model_and_hold_a_part_each"),
    ),
    Fault(
        "pipeline: one stage's part of the model is not in its list",
        "common/models/saved_files.py",
        "for files, *_ in parts for name, file in files.items()}",
        "for files, *_ in parts[:-1] for name, file in files.items()}",
        _unit("pipeline", "stages_are_saved_as_one_model_and_hold_a_part_each"),
    ),
    Fault(
        "tensor parallel: each rank clips by the norm of its own part",
        "common/training/tensor_parallel.py",
        "clip_divided(divided + whole, divided, whole, max_norm, device)",
        "clip_divided(divided + whole, [], divided + whole, max_norm, device)",
        _unit("tensor_parallel", "divided_models_learn_what_whole_ones_do"),
    ),
    Fault(
        "tensor parallel: ranks whose weights went apart are not noticed",
        "common/training/tensor_parallel.py",
        "if not difference <= AGREEMENT:",
        "if difference < 0:",
        _unit("tensor_parallel", "ranks_seeded_alike_agree_and_others_are_refused"),
    ),
    Fault(
        "several machines: gradients stay on their own machine",
        "3.2_summarization/run_0_cpu_x2/my_utils_summarization.py",
        "            dist.all_reduce(flat)\n",
        "            pass\n",
        ("tests/network/test_machines.py::test_two_ranks_on_loopback_train_one_model",),
    ),
    Fault(
        "several machines: overlapped gradients are divided by the ranks once too often",
        "3.2_summarization/run_0_cpu_x2/my_utils_summarization.py",
        "factor = self.ranks if self.overlaps else 1",
        "factor = 1",
        _equals_one_device("summarization, plain loop, torch.distributed, accumulated, full, overlapped"),
    ),
    Fault(
        "several machines: other training rows on one of them are not noticed",
        "common/runtime/machines.py",
        'product(others, ("versions", "code", "settings", "rows", "data", "model"))',
        'product(others, ("versions", "code", "settings", "rows", "model"))',
        _unit("machines", "who_differs_is_named"),
    ),
    Fault(
        "several machines: ranks that start again take an earlier start's roll for theirs",
        "common/runtime/elastic.py",
        "own in _value(part, LIST).split()",
        "_value(part, LIST)",
        _unit("elastic", "each_start_has_a_part_of_the_store_of_its_own"),
    ),
    Fault(
        "several machines: fewer of them take smaller steps",
        "common/runtime/elastic.py",
        '"gradient_accumulation_steps": rows // at_once}',
        '"gradient_accumulation_steps": run.gradient_accumulation_steps}',
        _unit("elastic", "other_ranks_take_the_same_steps"),
    ),
    Fault(
        "several machines: they begin with different weights",
        "3.2_summarization/run_0_cpu_x2/my_utils_summarization.py",
        "if len({digest for _, digest in found}) > 1:",
        "if len({digest for _, digest in found}) > 2:",
        _unit("machines", "other_weights_are_refused"),
    ),
    Fault(
        "several machines: each member of a Valohai task takes itself for the first",
        "valohai_step.py",
        "{first}:29400",
        "{own}:29400",
        _unit("valohai_step", "members_meet_at_the_first_one"),
    ),
    Fault(
        "each rank works on the first GPU",
        "common/hardware/devices.py",
        'f"{kind}:{local_rank}"',
        'f"{kind}:0"',
        _unit("device_maps", "devices_are_named_as_torch_does"),
    ),
    Fault(
        "fewer ranks than the run asks for are not noticed",
        "common/runtime/rank.py",
        "    if started != run.world_size:\n",
        "    if started > run.world_size:\n",
        _unit("launch", "a_world_of_another_size_is_refused_with_the_command_for_it"),
    ),
    Fault(
        "a rank on a second machine names a GPU that it does not work on",
        "common/base/print_prefix.py",
        'f"GPU{index or 0}"',
        'f"GPU{rank}"',
        _unit("print_prefix", "prefix_names_rank_and_device"),
    ),
)

CHECKPOINTS = (
    Fault(
        "the last file of a checkpoint is not in its list",
        "common/training/checkpoints.py",
        '        for path in sorted(folder.rglob("*"))\n',
        '        for path in sorted(folder.rglob("*"))[:-1]\n',
        _faults("checkpoints", "what_is_committed_is_whole_and_says_what_it_is_of"),
    ),
    Fault(
        "the bytes of a checkpoint are not compared with its list",
        "common/training/checkpoints.py",
        '        if digest_of(folder / name) != file["sha256"]:\n',
        '        if not file["sha256"]:\n',
        _faults("checkpoints", "any_flipped_byte_and_any_truncation_is_caught"),
    ),
    Fault(
        "a file that is missing from a checkpoint is not noticed",
        "common/training/checkpoints.py",
        "        if name not in there:\n            raise",
        "        if name not in there:\n            continue\n        if name not in there:\n            raise",
        _faults("checkpoints", "a_cut_a_missing_and_a_further_file_are_caught"),
    ),
    Fault(
        "the checkpoint before is removed before the new one is whole",
        "common/training/checkpoints.py",
        "            self.partial.mkdir(parents=True)\n",
        "            [remove(each) for each in found_in(folder.parent)]\n"
        "            self.partial.mkdir(parents=True, exist_ok=True)\n",
        _faults("checkpoints", "killed_at_any_write_the_checkpoint_before_is_used"),
    ),
    Fault(
        "the best checkpoint is removed when others follow",
        "common/training/checkpoints.py",
        '{f"checkpoint-{step}" for step in best_ones if step} | ',
        "",
        _unit("training", "training_ends_after_validations_without_a_better_model"),
    ),
    Fault(
        "a damaged checkpoint is gone on from",
        "common/training/checkpoints.py",
        "        else:\n            return folder\n    return None\n",
        "        return folder\n    return None\n",
        _faults("checkpoints", "a_damaged_one_is_named_and_kept_aside_and_the_one_before_is_used"),
    ),
    Fault(
        "a checkpoint of steps with other rows is gone on from",
        "common/training/resuming.py",
        "for name, reason in reasons.items() if was[name] != own[name])\n",
        "for name, reason in reasons.items() if was[name] != own[name] and name != 'rows_per_step')\n",
        _unit("resumable", "a_checkpoint_of_another_run_is_refused"),
    ),
    Fault(
        "a run goes on without its random numbers",
        "common/training/saver.py",
        "if ranks_then == ranks and missing:",
        "if ranks_then != ranks and missing:",
        _faults("resume", "without_a_ranks_random_numbers_or_with_other_rows_a_run_does_not_go_on"),
    ),
    Fault(
        "a pipeline that goes on forgets its optimizer",
        "common/training/part.py",
        "        parts = self.state(is_full)\n",
        "        is_full = False\n        parts = self.state(is_full)\n",
        _faults("resume", "a_run_that_goes_on_ends_where_a_straight_one_does[pp-within an epoch]"),
    ),
    Fault(
        "a loop that goes on draws other random numbers",
        "common/training/saver.py",
        '    torch.set_rng_state(held["torch"])\n',
        "",
        _faults("resume", "a_run_that_goes_on_ends_where_a_straight_one_does[pp-within an epoch]"),
    ),
    Fault(
        "a pickle in a list of shards is executed",
        "common/training/safe_loading.py",
        "                _Unpickler(file).load()\n",
        "                pickle.load(file)\n",
        _faults("checkpoints", "a_hostile_pickle_runs_nowhere"),
    ),
    Fault(
        "what was saved is not compared with what was trained",
        "common/models/merging.py",
        "    if not difference <= limit:\n",
        "    if difference < 0:\n",
        _unit("models", "unequal_logits_are_refused"),
    ),
    Fault(
        "the adapter is not merged into the saved model",
        "common/models/merging.py",
        "PeftModel.from_pretrained(base, adapter).merge_and_unload()\n",
        "PeftModel.from_pretrained(base, adapter).unload()\n",
        GOLDEN,
    ),
)

PLANS = (
    Fault(
        "memory plan: gradients are left out",
        "common/planning/memory_plan.py",
        'return [*self._gradients(self.trained, "gradients"), self.tower_gradients]',
        "return []",
        _unit("memory_plan", "sixteen_bytes_per_trained_weight_as_in_the_seed"),
    ),
    Fault(
        "memory plan: one of Adam's two states is left out",
        "common/planning/job.py",
        "return 2 * weight_bytes if states is None else states",
        "return 1 * weight_bytes if states is None else states",
        _unit("memory_plan", "pure_bf16_takes_eight_bytes_and_fp32_sixteen"),
    ),
    Fault(
        "memory plan: the MLP's activations are left out",
        "common/planning/layer_activations.py",
        "return [*terms, *self._mlp(stack), *self._of_linears(stack)]",
        "return [*terms, *self._of_linears(stack)]",
        _unit("dry_run", "the_closed_form_says_the_same"),
    ),
    Fault(
        "memory plan: of a row's logits those of one position are counted",
        "common/planning/memory_plan.py",
        "return self.batch.sequences * self.batch.labelled if chooses else",
        "return self.batch.sequences if chooses else",
        _unit("memory_plan", "a_head_without_last_layers_and_embeddings_alone_are_counted"),
    ),
    Fault(
        "memory plan: DDP's buckets are left out",
        "common/planning/between_steps.py",
        "in DDP's buckets\", trained * job.has_buckets, each)",
        "in DDP's buckets\", trained * False, each)",
        _unit("dry_run", "ddp_keeps_all_gradients_all_the_time"),
    ),
    Fault(
        "memory plan: a stage holds one micro-batch at a time",
        "common/planning/job.py",
        "        return min(self.micro_batches, waiting)\n",
        "        return 1\n",
        _unit("memory_plan", "micro_batches_in_flight", "gpipe_holds_every_micro_batch_on_every_stage"),
    ),
    Fault(
        "memory plan: the temporary of softmax's backward kernel is left out",
        "common/planning/layer_activations.py",
        "SOFTMAX_TEMPORARY_BYTES = 4\n",
        "SOFTMAX_TEMPORARY_BYTES = 0\n",
        _unit("published_memory", "a_t4_s_peaks_are_within_the_bars"),
    ),
    Fault(
        "planner: the safe figure is no more than the likely one",
        "common/planning/terms.py",
        "return self.peak_gib + self.spread / GIB",
        "return self.peak_gib",
        _unit(
            "published_memory",
            "no_run_that_ran_out_is_said_to_fit_nor_one_above_its_card_and_few_that_fitted_not_to",
        ),
    ),
    Fault(
        "planner: rows of differing lengths leave no blocks behind",
        "common/planning/memory_plan.py",
        "left_behind = (layer + loss) * self.batch.padded",
        "left_behind = 0.0",
        _unit("published_memory", "plans_of_held_out_points_are_within_the_bars"),
    ),
    Fault(
        "planner: what does not fit is said to fit",
        "common/planning/plans.py",
        "        return self._training_share <= 1\n",
        "        return self._training_share >= 1\n",
        _unit("planner", "answers_are_explained"),
    ),
    Fault(
        "planner: the largest batch is one row too large",
        "common/planning/plans.py",
        "return step * self._most(",
        "return step + step * self._most(",
        _unit("planner", "the_largest_batch_fits_and_one_row_more_does_not"),
    ),
    Fault(
        "time plan: a ring's all-reduce sends half of what it does",
        "common/planning/time_plan.py",
        "return 0.0, 2 * around * summed_bytes(",
        "return 0.0, around * summed_bytes(",
        _unit("time_plan", "tensor_parallel_divides_layers_and_waits_for_its_sums"),
    ),
    Fault(
        "time plan: the bubble of a pipeline is left out",
        "common/planning/time_plan.py",
        "bubble_s = (len(seconds) - 1) / job.micro_batches * slowest",
        "bubble_s = 0.0",
        _unit("time_plan", "one_after_the_other_takes_as_long_as_one_and_micro_batches_less"),
    ),
    Fault(
        "cost: the rent of one GPU is taken for that of all",
        "common/planning/time_plan.py",
        "sum(price.usd_per_hour for price in prices) / SECONDS_PER_HOUR",
        "prices[0].usd_per_hour / SECONDS_PER_HOUR",
        _unit("planner", "rows_of_ddp_are_each_rank_s"),
    ),
    Fault(
        "device maps: tied embeddings and head are put on two devices",
        "common/planning/device_maps.py",
        '("first", "last") if architecture.tied and job.parallelism.layers_in_turn else ("apart",)',
        '("apart",)',
        _unit("device_maps", "tied_embeddings_and_head_share_a_device_in_one_process"),
    ),
    Fault(
        "device maps: a layer may be torn apart",
        "common/planning/device_maps.py",
        "        if device != its_device:\n",
        "        if device < 0:\n",
        _unit("device_maps", "wrong_maps_are_refused_in_a_sentence"),
    ),
    Fault(
        "catalogue: a card's memory is the vendor's GB, taken for GiB",
        "common/hardware/catalogue.toml",
        "memory_gib = 47.43\ncuda_cores = 10_752\n",
        "memory_gib = 48.0\ncuda_cores = 10_752\n",
        _unit("hardware", "memory_is_a_little_below_the_name"),
    ),
    Fault(
        "catalogue: a rate is the sparse one, twice the real",
        "common/hardware/catalogue.toml",
        "tf32 = 77.4, bf16 = 154.8, fp16 = 154.8",
        "tf32 = 154.8, bf16 = 309.7, fp16 = 309.7",
        _unit("hardware", "rates_are_dense", "rates_fit_together"),
    ),
    Fault(
        "dry run: memory that is freed is counted for ever",
        "common/runtime/memory_tracker.py",
        "            weakref.finalize(storage, self._free, entry)\n",
        "",
        _unit("dry_run", "the_tracker_forgets_what_is_freed"),
    ),
    Fault(
        "preflight: the first step, which warms up, is timed",
        "common/checks/measured_steps.py",
        "zip(self.ends_s, self.ends_s[1:], strict=False))",
        "zip([0.0, *self.ends_s], self.ends_s, strict=False))",
        _unit("preflight", "the_first_step_is_not_timed"),
    ),
    Fault(
        "quantization: double quantization is not done",
        "common/models/quantization.py",
        'bnb_4bit_use_double_quant=run.quantization == "nf4-double",',
        "bnb_4bit_use_double_quant=False,",
        _unit("quantization", "the_planner_counts_the_bytes_that_are_stored"),
    ),
)

REPORTS = (
    Fault(
        "a cell of a table is typed, not taken from the record",
        "bench/tables/chats.py",
        '            "batch",\n            "time as Time",\n',
        '            Column("Batch size", lambda _: "8 x2"),\n            "time as Time",\n',
        ("tests/repo/test_repository.py::test_every_table_is_what_the_records_say",),
    ),
    Fault(
        "a typed figure stays in a README",
        "bench/tables/pages.py",
        'lambda found: found[1] + rendered(found["name"], records) + found[3], text)',
        "lambda found: found[0], text)",
        _unit("report", "a_typed_figure_is_overwritten_by_the_records"),
    ),
    Fault(
        "a README that is out of date passes",
        "bench/report.py",
        "    return int(not write and (bool(stale) or not all_are_read))\n",
        "    return int(not write and not all_are_read)\n",
        _unit("report", "tables_check_exits_with_1_when_a_readme_is_out_of_date"),
    ),
    Fault(
        "runs of different work are compared",
        "common/reporting/rows.py",
        "if workload(candidate, same) == shared and",
        'if candidate["effective_batch_size"] == record["effective_batch_size"] and',
        _unit("report", "runs_of_other_work_or_machines_are_not_compared"),
    ),
    Fault(
        "a run that failed is called completed",
        "common/base/errors.py",
        '    return "failed"\n',
        '    return "completed"\n',
        _unit("run_record", "a_failed_phase_leaves_a_record_with_its_status"),
    ),
    Fault(
        "a run that failed pushes a completed one out",
        "common/runtime/disks.py",
        "    if folder.with_name(folder.name + PREVIOUS).exists() and not _completed(folder):\n",
        "    if folder.with_name(folder.name + PREVIOUS).exists() and _completed(folder):\n",
        _unit("run_record", "a_second_run_of_the_same_name_starts_empty_and_keeps_the_one_before"),
    ),
    Fault(
        "a peak far beyond its plan is not said",
        "common/runtime/recorder.py",
        "abs(peak_gib / planned_gib - 1) > store.PLAN_TOLERANCE",
        "abs(peak_gib / planned_gib - 1) > 10 * store.PLAN_TOLERANCE",
        _unit("run_record", "a_peak_beyond_its_plan_is_said_aloud"),
    ),
    Fault(
        "updates that round away are called updates",
        "common/training/callbacks.py",
        "(after != before).sum()",
        "(after == after).sum()",
        _unit("callbacks", "bfloat16_loses_most_of_small_updates_and_fp32_none"),
    ),
    Fault(
        "a short question is answered from behind its padding",
        "common/tasks/sampling.py",
        'tokenizer.pad({"input_ids": prompts}, padding_side="left", ',
        'tokenizer.pad({"input_ids": prompts}, padding_side="right", ',
        _unit("evaluation", "batched_answers_equal_one_row_at_a_time"),
    ),
    Fault(
        "a judge's score depends on the padding",
        "common/tasks/answers.py",
        "return torch.where(mask.bool(), hidden, 0.0).sum(1) / mask.sum(1).clamp(min=1)",
        "return hidden.mean(1)",
        _unit("evaluation", "scores_are_distances_that_padding_does_not_move"),
    ),
    Fault(
        "a sibling run folder that is no copy passes",
        "assets/siblings.py",
        'if not path.is_file() or path.read_text("utf-8") != text\n',
        "if not path.is_file()\n",
        _unit("siblings", "a_changed_line_a_cell_and_a_number_of_processes_are_found_and_mended"),
    ),
)

PROCESSES = (
    Fault(
        "a token is printed",
        "common/base/print_prefix.py",
        "without_secrets(plain.getvalue())",
        "plain.getvalue()",
        _faults("secrets", "printed_lines_lose_them"),
    ),
    Fault(
        "a token stays in the error that an error came from",
        "common/base/secrets.py",
        "        error = error.__cause__ or error.__context__\n",
        "        error = None\n",
        _faults("secrets", "an_error_loses_its_secrets_and_stays_what_it_is"),
    ),
    Fault(
        "a setting with a password in it is kept in the record",
        "common/base/secrets.py",
        '    return "a password or a token before the @ of a URL" if _logins_in(value) else None\n',
        "    return None\n",
        _faults("secrets", "a_setting_with_a_secret_is_refused_without_saying_it"),
    ),
    Fault(
        "a process outlives its launcher",
        "common/runtime/watch.py",
        "        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "        pass\n",
        _faults("processes", "nobody_outlives_the_agent[ddp-9]"),
    ),
    Fault(
        "a rank that hangs is not noticed",
        "common/runtime/watch.py",
        "if waited_s > here.allowed_s(self.step_timeout_s) + patience_s:",
        "if waited_s < 0:",
        _unit("watch", "a_rank_says_where_it_is_at_once_and_ends_when_nothing_moves"),
    ),
    Fault(
        "of ranks that wait, those that wait are named, not the one that hangs",
        "common/runtime/watch.py",
        "if place.passed < max(place.passed for place in places)]",
        "if place.passed > min(place.passed for place in places)]",
        _unit("watch", "of_ranks_that_speak_those_behind_keep_the_others_waiting"),
    ),
    Fault(
        "a run that hung ends with exit code 0",
        "common/runtime/watch.py",
        "        os._exit(HUNG_EXIT_CODE)\n",
        "        os._exit(0)\n",
        _unit("watch", "a_rank_says_where_it_is_at_once_and_ends_when_nothing_moves"),
    ),
    Fault(
        "a user's mistake ends with exit code 1",
        "common/base/command_line.py",
        "_say_once(error)\n            sys.exit(BAD_INPUT_EXIT_CODE)\n",
        "_say_once(error)\n            sys.exit(1)\n",
        _recipes("launchers", "bad_input_is_one_sentence_and_exit_code_2[number]"),
    ),
    Fault(
        "gradients that are no numbers reach the weights",
        "common/training/loop.py",
        "if not self.args.fp16 and not math.isfinite(norm):",
        "if self.args.fp16 and not math.isfinite(norm):",
        _faults("processes", "a_step_that_cannot_be_taken_stops_all_before_it[ddp-nan]"),
    ),
    Fault(
        "two runs write into one results folder",
        "common/runtime/disks.py",
        "        if refusals := gather_object(refusals):\n",
        "        if refusals := []:\n",
        _faults("processes", "a_results_folder_has_one_owner_at_a_time[single]"),
    ),
    Fault(
        "a command that fails is hidden",
        "common/runtime/launchers.py",
        "    if process.returncode != 0:\n",
        "    if process.returncode < 0:\n",
        _unit("launch", "a_failing_command_is_not_hidden"),
    ),
)

GPUS = (
    Fault(
        "fp16's skipped steps end a run after all its work",
        "common/training/loop.py",
        "        self.skipped_steps += self.scaler.get_scale() < scale\n",
        "        self.skipped_steps += 0\n",
        _unit("training", "a_step_that_overflowed_is_none_of_the_schedules"),
    ),
    Fault(
        "weights that are given up stay in memory",
        "common/models/shards.py",
        "        tensor.data, tensor.grad = tensor.new_empty(0), None\n",
        "        tensor.grad = None\n",
        _unit("training", "weights_that_are_given_up_take_no_memory_whoever_still_has_them"),
    ),
    Fault(
        "a run begins whose checkpoints the disk cannot hold",
        "common/checks/inputs.py",
        "    if free < need.total_bytes:\n",
        "    if free < 0:\n",
        _unit("disk_space", "too_little_room_is_refused_with_both_sizes"),
    ),
    Fault(
        "a rank that waits for one that is gone does not end",
        "common/runtime/watch.py",
        "                    os._exit(1)\n",
        "                    return\n",
        _unit("watch", "a_rank_that_waits_where_no_signal_is_handled_ends_when_it_is_told_to"),
    ),
    Fault(
        "model parallel's layers all stay on the first device",
        "common/models/loading.py",
        "            device_map=device_map,\n            output_",
        "            device_map=dict.fromkeys(device_map, min(device_map.values())),\n            output_",
        _equals_one_device("MP, full"),
    ),
)

MODELS_AND_ROWS = (
    Fault(
        "adapters enter the vision tower, whose layers have the same names",
        "common/models/trained_weights.py",
        '    part, takes_all = language_part(model), run.target_modules == "all-linear"\n',
        '    part, takes_all = "", run.target_modules == "all-linear"\n',
        _unit("pictures", "adapters_stand_in_the_language_layers_alone"),
    ),
    Fault(
        "a picture is cut at max_length",
        "common/data/pictures.py",
        "    if end > max_length:\n",
        "    if False:\n",
        _unit("pictures", "a_picture_is_never_cut"),
    ),
    Fault(
        "a photograph that was taken upright has the tokens of a wide one",
        "common/data/pictures.py",
        "in TURNED\n",
        "in ()\n",
        _unit("pictures", "the_tokens_of_a_large_picture_are_the_processor_s_also_where_the_camera_was_turned"),
    ),
    Fault(
        "the picture that is put in another's place may have the same right answer",
        "3.3_visual_question_answering/run_0_cpu_x1/my_utils_visual_question_answering.py",
        ' if said != answer and not facts_in(said, {"facts": facts}))\n',
        " if said)\n",
        _unit("pictures", "another_picture_has_another_right_answer_to_the_same_kind_of_question"),
    ),
    Fault(
        "of several answers in a row only the last is learnt",
        "common/data/templates.py",
        "        _add_earlier_answers(masks, rows, whole, tokenizer, template)\n",
        "        pass\n",
        _unit("data", "what_is_learnt_of_a_row_with_several_turns"),
    ),
    Fault(
        "an answer that a template rewrites later is learnt where it does not stand",
        "common/data/templates.py",
        "        if through[:start] == before and whole[number][:end] == through:\n",
        "        if True:\n",
        _unit("data", "answers_that_a_template_rewrites_later_are_not_learnt"),
    ),
    Fault(
        "a row's tools are left out",
        "common/data/templates.py",
        "                messages, tools=tools, return_dict=True,",
        "                messages, return_dict=True,",
        _unit("data", "tools_are_written_into_a_row"),
    ),
    Fault(
        "an archive is read as if it were a compressed file",
        "common/data/files.py",
        "    if suffix in ARCHIVES or (compression and suffix in BINARY):\n",
        "    if False:\n",
        _unit("labelled_data", "an_archive_is_refused"),
    ),
    Fault(
        "a folder's own validation and test files are passed over",
        "common/data/splits.py",
        "        if found:\n            chosen[split] = found\n",
        "        if found and split == 'train':\n            chosen[split] = found\n",
        _unit("labelled_data", "splits_that_a_folder_lacks_are_held_out"),
    ),
    Fault(
        "of a text that is longer than max_length only the beginning is learnt",
        "common/data/messages.py",
        "                for start in range(0, len(ids), run.max_length):\n",
        "                for start in (0,):\n",
        _unit("formats", "every_token_of_a_text_is_learnt_once_with_the_end_in_pieces"),
    ),
    Fault(
        "rows on disk come in the order of their file, whichever were asked for",
        "common/data/stored_rows.py",
        "    return RowsOnDisk(rows.mapped.select(numbers)) if",
        "    return RowsOnDisk(rows.mapped.select(sorted(numbers))) if",
        _unit("stored_rows", "rows_on_disk_are_those_that_were_stored"),
    ),
    Fault(
        "the rows that were in memory are lost when the others go to the disk",
        "common/data/stored_rows.py",
        "            return _on_disk(chain(held, following))\n",
        "            return _on_disk(following)\n",
        _unit("stored_rows", "rows_on_disk_are_those_that_were_stored"),
    ),
    Fault(
        "a missing answer in a table is learnt as the word nan",
        "common/data/formats.py",
        "(isinstance(content, float) and math.isfinite(content)):",
        "isinstance(content, float):",
        _unit("formats", "a_row_that_cannot_be_learnt_from_is_refused_by_file_and_line"),
    ),
    Fault(
        "QLoRA trains a model whose weights are not in 4 bits",
        "common/models/families.py",
        "LEAST_QUANTIZED_SHARE = 0.9\n",
        "LEAST_QUANTIZED_SHARE = 0.0\n",
        ("tests/recipes/test_families.py::test_a_family_is_trained_or_refused[falcon-2.3]",),
    ),
    Fault(
        "experts that a gradient needs are kept dequantized of all layers",
        "common/models/families.py",
        "why_not_in_4_bits(run.parallelism, run.gradient_checkpointing)",
        "why_not_in_4_bits(run.parallelism, True)",
        ("tests/recipes/test_families.py::test_experts_in_4_bits_take_no_adapters_and_are_dequantized_layer_by_layer",),
    ),
    Fault(
        "gradients of keys that layers share are lost where layers are recomputed",
        "common/models/families.py",
        '    return {"use_reentrant": False}, "use_reentrant is',
        '    return {}, "use_reentrant is',
        _unit("unlike_layers", "keys_that_layers_share_get_their_gradients_when_layers_are_recomputed"),
    ),
    Fault(
        "modules whose results are added are on two devices",
        "common/models/placement.py",
        "stages - 1 if len(beside) == 1 else 0)",
        "stages - 1)",
        _unit("unlike_layers", "modules_whose_results_are_added_are_on_one_device"),
    ),
    Fault(
        "a dry run takes the layers of a hybrid for equal ones",
        "common/checks/dry_run.py",
        " and kinds[few : few - more] == kinds[more:]:",
        ":",
        _unit("dry_run", "layers_that_differ_are_told_by_what_repeats"),
    ),
    Fault(
        "freeing a quantized mixture leaves its scales in memory",
        "common/models/shards.py",
        "                for holder in module.modules():  # the layer, or what reads experts\n",
        "                for holder in [module]:\n",
        _unit("quantization", "a_mixtures_experts_are_stored_in_4_bits"),
    ),
    Fault(
        "experts that do not work on a token are counted as work",
        "common/models/trained_weights.py",
        "    multiplied = weight_counts(model) - idle_weights(model) - seeing\n",
        "    multiplied = weight_counts(model) - seeing\n",
        ("tests/recipes/test_families.py::test_experts_are_held_all_and_some_are_at_work",),
    ),
    Fault(
        "GPT-2's merged model is transposed",
        "common/models/quantization.py",
        "            module.weight = torch.nn.Parameter(linear.weight.T.contiguous(), requires_grad=False)\n",
        "            module.weight = torch.nn.Parameter(linear.weight.contiguous(), requires_grad=False)\n",
        ("tests/recipes/test_families.py::test_a_family_is_trained_or_refused[gpt2-2.3]",),
    ),
    Fault(
        "an adapter that was not found again is taken for trained",
        "common/models/merging.py",
        '    if any(weight.any() for name, weight in saved.items() if "lora_B" in name):\n',
        "    if False:\n",
        _unit("models", "a_trained_adapter_that_changes_nothing_is_refused"),
    ),
    Fault(
        "in the chat the tuned model answers for its base",
        "common/serving/tuned_runs.py",
        "    return TunedModels(model, model, model.disable_adapter, tokenizer)\n",
        "    return TunedModels(model, model, nullcontext, tokenizer)\n",
        _unit("chat", "base_and_adapter_answer_beside_each_other"),
    ),
)

CHOSEN = (*DATA, *LOSS, *SEVERAL_RANKS, *CHECKPOINTS, *PLANS, *REPORTS, *PROCESSES, *GPUS, *MODELS_AND_ROWS)
