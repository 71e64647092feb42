"""What a run will learn from: its rows counted, and one of them as the model sees it, before anything is trained."""

import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.inert import printable
from common.base.parsing import OneSentenceParser, parse_overrides, settings_parser
from common.base.run_config import LARGEST, RunConfig, check_choice
from common.base.specs import TASKS
from common.data.pairs import prompt_length
from common.data.row_checks import digest
from common.data.rows import IGNORED_LABEL, SPLIT_NAMES, Splits, Tokens, first_tokens, is_plain, tokens_in
from common.data.splits import check_tokens, load_splits, tokens_of
from common.models.loading import load_tokenizer

LEARNT, READ, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"  # terminal colours: bold green, dim, none


@dataclass(frozen=True)
class Preview:
    """The rows of a run, and each training row's tokens, which are cut at `max_length` only when they are trained."""

    run: RunConfig
    splits: Splits
    tokens: Sequence[Tokens]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each training row, of a pair the longer answer's, in increasing order."""
        return sorted(map(tokens_in, self.tokens))

    @property
    def learnt(self) -> list[int]:
        """Tokens of each conversation that are learnt, within `max_length`."""
        return [sum(label != IGNORED_LABEL for label in row["labels"][: self.run.max_length]) for row in self.tokens]

    @property
    def repeated(self) -> int:
        """Training rows that an earlier one equals, but for case and spacing."""
        return len(self.splits.train) - len(Counter(map(digest, self.splits.train)))

    def row(self, number: int, tokenizer: PreTrainedTokenizerBase, in_colour: bool = True) -> str:
        """Return a training row's text within `max_length`, as `coloured` writes it; the first is number 1."""
        row = first_tokens(self.tokens[number - 1], self.run.max_length)
        text = coloured(row, tokenizer, in_colour)
        if "rejected_ids" not in row:
            return text
        return f"{text}\nthe rejected answer: {printable(tokenizer.decode(row['rejected_ids'][prompt_length(row) :]))}"

    def __str__(self) -> str:
        lengths = self.lengths
        rows = (self.splits.train, self.splits.validation, self.splits.test)
        sizes = ", ".join(f"{len(split):,} {name}" for name, split in zip(SPLIT_NAMES, rows, strict=True))
        ninetieth = lengths[int(0.9 * (len(lengths) - 1))]
        cut = sum(length > self.run.max_length for length in lengths)
        share, beyond = self._said_of_learning()
        return "\n".join([
            f"rows     {sizes}; {self.repeated:,} training rows repeat an earlier one",
            f"tokens   {sum(lengths):,} in training rows{share}",
            f"length   {lengths[0]:,} to {lengths[-1]:,} tokens, median {statistics.median(lengths):,.0f}; nine in ten "
            f"rows have at most {ninetieth:,}",
            f"cut      {cut:,} rows have more than max_length, {self.run.max_length:,}{beyond}",
        ])  # fmt: skip

    def _said_of_learning(self) -> tuple[str, str]:
        if self.run.goal.summarizes:
            most = self.run.max_target_length
            cut = sum(len(row["labels"]) > most for row in self.tokens)
            return "", f"; {cut:,} summaries have more than max_target_length, {most:,}"
        if not self.run.goal.converses:
            return "", ""
        if is_plain(self.splits.train):
            pieces = f"; they are divided into pieces of {self.run.max_length:,} tokens"
            return ", with end tokens; all are learnt", pieces
        learnt = self.learnt
        none = learnt.count(0)
        remedy = f": --max_length {self.lengths[-1]} has all" if none else ""
        beyond = f"; {none:,} have nothing to learn before it{remedy}"
        if "rejected_ids" in self.tokens[0]:
            return ", of each pair with the longer answer", beyond
        return f", {sum(learnt):,} of them learnt ({sum(learnt) / sum(self.lengths):.0%})", beyond


def preview(run: RunConfig, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Preview:
    """Turn the training rows into tokens, whole ones, to be counted and shown."""
    lengths = ("max_length", "max_target_length") if run.goal.summarizes else ("max_length",)
    uncut = replace(run, **dict.fromkeys(lengths, LARGEST), long_texts="cut")
    return Preview(run, splits, tokens_of(splits.train, tokenizer, uncut))


def coloured(row: Tokens, tokenizer: PreTrainedTokenizerBase, in_colour: bool = True) -> str:
    """Return a row's text with what is learnt in green; without colours that stands between `[[` and `]]`."""
    around_learnt, around_read = ((LEARNT, PLAIN), (READ, PLAIN)) if in_colour else (("[[", "]]"), ("", ""))
    text, learns = "", (label != IGNORED_LABEL for label in row["labels"])
    for is_learnt, part in groupby(zip(learns, row["input_ids"], strict=True), itemgetter(0)):
        starts, ends = around_learnt if is_learnt else around_read
        text += f"{starts}{printable(tokenizer.decode([token for _, token in part]))}{ends}"
    return text


def run_of_rows(overrides: Sequence[str]) -> RunConfig:
    """Return the run that the options describe; where they name no technique, with one that its task is done with."""
    task = settings_parser(RunConfig()).settings(overrides)["task"]
    check_choice("task", task, TASKS)
    technique = next(each for each in (RunConfig.technique, *TASKS[task].techniques) if each in TASKS[task].techniques)
    return parse_overrides(RunConfig(task=task, technique=technique), overrides)


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    epilog = "Every setting of a run may follow, such as --model, --prompt_column, --max_length or --train_on."
    parser = OneSentenceParser(prog="python -m common.data", description=__doc__, epilog=epilog)
    parser.add_argument("data", help="a file, a folder, a URL, or the id of a dataset on the Hub")
    row_help = "the training row to show; where rows are held out, the rest is in a shuffled order"
    parser.add_argument("--row", type=int, default=1, help=row_help)
    options, overrides = parser.parse_known_args()
    run = replace(run_of_rows(overrides), data=options.data)
    splits = load_splits(run)
    if not 1 <= options.row <= len(splits.train):
        raise BadInputError(f"--row is {options.row}, but there are {len(splits.train):,} training rows.")
    tokenizer = load_tokenizer(run)
    check_tokens(splits, tokenizer, run)
    shown = preview(run, splits, tokenizer)
    print(shown)
    if run.goal.converses:
        in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        how = "green" if in_colour else "between [[ and ]]"
        row = shown.row(options.row, tokenizer, in_colour)
        print(f"\ntraining row {options.row} (--row N shows another), what is learnt {how}:\n{row}")
