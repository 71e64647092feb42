"""What is learnt of answers to questions about pictures: the answers, with the pixels that they are about."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.batches import Collate, make_collator
from common.data.pictures import pixels_of
from common.data.rows import Tokens
from common.tasks import answers


def _picture_collator(tokenizer: PreTrainedTokenizerBase, _: PreTrainedModel, run: RunConfig) -> Collate:
    collate = make_collator(tokenizer, multiple=run.pad_to_multiple_of)

    def collate_both(rows: list[Tokens]) -> dict[str, torch.Tensor]:
        texts = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
        return {**collate(texts), **pixels_of([row["picture"] for row in rows], tokenizer, run.picture_noise)}

    return collate_both


ANSWERS = replace(answers.ANSWERS, collator=_picture_collator)
