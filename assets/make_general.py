"""Make `general/museum.jsonl`: chats that the embedded base was trained on last, to see what tuning makes it forget."""

import json

from assets.make_embedded_base import SEASONS, corpus_chats
from common.tasks.forgetting import GENERAL

CHATS = 48


def main() -> None:
    """Write the last chats of the corpus."""
    *_, last = corpus_chats(seasons=SEASONS)
    lines = [json.dumps({"messages": messages}) for messages in last[-CHATS:]]
    (GENERAL / "museum.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
