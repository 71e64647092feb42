"""Talk to a run's base and tuned model beside each other.

    python -m common.chat 2.1_lora_finetuning/run_0_cpu_x1/results/python-batch16-seed42
    python -m common.chat python-batch16-seed42 "Who made the Winged Bowl of Kelmor?"

/reset begins a new conversation, /quit or the end of the input (Ctrl-D) ends it.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, TextStreamer

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError, reading
from common.base.inert import printable
from common.base.parsing import OneSentenceParser
from common.data.answer_ends import stops_of
from common.models.loading import longest_readable
from common.serving.tuned_runs import TunedModels, find_run, load_models

Message = dict[str, str]


class InertStreamer(TextStreamer):
    """Prints an answer as it is written; what would steer the terminal is shown as its number."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print it."""
        super().on_finalized_text(printable(text), stream_end)


@dataclass
class Conversation:
    """What was said so far, to each of both models."""

    models: TunedModels
    max_new_tokens: int
    temperature: float
    system: str = ""

    def __post_init__(self) -> None:
        self.models.tokenizer.chat_control_tokens = ()  # what is typed is text, as in training, but `<think>` and such
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        self.turns: dict[str, list[Message]] = {"base": list(start), "tuned": list(start)}

    def ask(self, question: str) -> dict[str, str]:
        """Print both models' answers to a question as they are written, and return them."""
        with self.models.without_adapter():
            answers = {"base": self._answer("base", self.models.base, question)}
        answers["tuned"] = self._answer("tuned", self.models.tuned, question)
        return answers

    @torch.no_grad()
    def _answer(self, name: str, model: PreTrainedModel, question: str) -> str:
        turns, tokenizer = self.turns[name], self.models.tokenizer
        turns.append({"role": "user", "content": question})
        with reading("What was said", f"Say it otherwise: the chat template of {tokenizer.name_or_path} must take it."):
            how = {"return_dict": True, "return_tensors": "pt", "sanitize_control_tokens": True}
            batch = tokenizer.apply_chat_template(turns, add_generation_prompt=True, **how)
        tokens, longest = batch["input_ids"].shape[1], longest_readable(model.config)
        if longest and tokens >= longest:
            raise BadInputError(
                f"What was said has {tokens} tokens, and the model reads {longest}: /reset begins a new conversation."
            )
        new_tokens = min(self.max_new_tokens, longest - tokens) if longest else self.max_new_tokens
        stops = stops_of(tokenizer, model.generation_config.eos_token_id)
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        print(f"{name:>5} > ", end="", flush=True)
        generated = model.generate(
            **batch.to(model.device),
            **sampling,
            **stops.settings(tokenizer),
            max_new_tokens=new_tokens,
            streamer=InertStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        answer = stops.cut(tokenizer.decode(generated[0, tokens:], skip_special_tokens=True))
        turns.append({"role": "assistant", "content": answer})
        return answer


def talk(conversation: Conversation) -> None:
    """Ask for questions and answer them, until the input ends."""
    print("/reset begins a new conversation, /quit ends")
    while True:
        try:
            question = input("  you > ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question == "/quit":
            return
        if question == "/reset":
            conversation.reset()
        elif question:
            try:
                conversation.ask(question)
            except BadInputError as refused:
                print(f"error: {refused}")


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = OneSentenceParser(prog="python -m common.chat", description=__doc__)
    parser.add_argument("run", help="results folder, or the name of a run")
    parser.add_argument("question", nargs="?", help="one question; without it they are asked for")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument("--base", default="", help="the base model's folder, if it has moved")
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 = the likeliest token each time")
    options = parser.parse_args()
    if options.max_new_tokens < 1 or options.temperature < 0:
        raise BadInputError("--max_new_tokens must be 1 or more, and --temperature 0 or more.")
    models = load_models(find_run(options.run, options.base))
    conversation = Conversation(models, options.max_new_tokens, options.temperature, options.system)
    if options.question:
        conversation.ask(options.question)
    else:
        talk(conversation)


if __name__ == "__main__":
    main()
