"""What serving a tuned model takes on a device, as vLLM does it: while a prompt is read, all other rows add a token."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from common.base.errors import reading
from common.hardware.devices import GIB
from common.hardware.prices import Price
from common.planning.architectures import Architecture, StackKind
from common.planning.gpu_overhead import with_overhead
from common.planning.model_configs import PUBLISHED, find_config
from common.planning.phases import PhaseSums
from common.planning.searches import largest
from common.planning.terms import DeviceMemory, Kind, Term, numbers, size_of

# bytes of a matrix's weight by GGUF's types; q8_0 has a 16-bit scale per block of 32 (ggml-common.h: `block_q8_0`)
GGUF_BYTES = {"GGUF f32": 4, "GGUF f16": 2, "GGUF q8_0": 1 + 2 / 32}
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")  # kinds of models (`model_type`) that are written as GGUF
WAYS = {"merged, 16 bits": "full", "16 bits and adapter": "lora", "4 bits and adapter": "qlora"}
READ_AT_ONCE = 8192  # tokens of a prompt, longer ones in parts (vLLM's `max_num_batched_tokens`, at most)
MOST_ROWS = 2**16  # that are asked for


def sliding_layers(architecture: Architecture, model: str, revision: str = "") -> int:
    """Return how many layers keep no more than their window, as Transformers' cache has it."""
    if not architecture.window:
        return 0
    from transformers import AutoConfig  # here: it imports torch, which takes two seconds

    with reading(f"The config.json of {model}", PUBLISHED):
        config = AutoConfig.from_pretrained(find_config(model, revision), trust_remote_code=False)
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * architecture.layers
    return kinds.count("sliding_attention")


@dataclass(frozen=True)
class Serving(PhaseSums):
    """A model that serves so many rows at once, as long as the job's, in one of the ways of its technique."""

    way: str = next(iter(WAYS))
    rows: int = 1
    sliding: int = 0  # layers that keep their window alone, and of it not the token that is read (cache_utils.py)

    def weights(self) -> list[Term]:
        """Return the model's weights, those of all experts included, and an adapter's; in GGUF vectors are in fp32."""
        whole = self.architecture
        if self.way not in GGUF_BYTES:
            return self._trained.weights()
        count = whole.matrix_weights + whole.embedding_parameters + whole.head_parameters
        matrices = numbers(Kind.WEIGHTS, "matrices", count, GGUF_BYTES[self.way])
        return [matrices, numbers(Kind.WEIGHTS, "vectors", whole.parameters - count, 4)]

    def cache(self) -> int:
        """Return the bytes of keys and values of all rows; a decoder behind an encoder has those of the text, too."""
        stacks, window, batch = self.architecture.stacks, self.architecture.window, self.job.batch
        whole = (stacks[-1].layers - self.sliding) * (stacks[-1].kind != StackKind.ENCODER)
        kept = sum(whole * each + self.sliding * min(each, window - 1) for each in map(batch.length_in, stacks))
        return 2 * self._keys(self.rows, kept, self.job.arithmetic_bytes)

    @cached_property
    def memory(self) -> DeviceMemory:
        """All of it, with the device's own overhead; an encoder has no cache, and reads all rows together."""
        length, a, cache = self.job.batch.length, self.job.arithmetic_bytes, self.cache()
        at_once, tokens = (1, min(length, READ_AT_ONCE) + self.rows - 1) if cache else (self.rows, length)
        logits = numbers(Kind.LOGITS, "logits, and in fp32", self.rows * self.architecture.vocab * (cache > 0), a + 4)
        reading = [*self._layer(at_once, tokens, tokens, trains=True), *self._images(1), logits]
        forward = max(reading, self._images(1, looking=True), key=size_of)
        terms = (*self.weights(), Term(Kind.BUFFERS, "keys and values", "L B S 2 K a", cache), *forward)
        return with_overhead(self.job, self.gpu, DeviceMemory("a prompt is read", terms))

    def figures(self, price: Price | None) -> dict[str, Any]:
        """Return what a reader is told; `beside` is reading a prompt, and the device's own overhead."""
        memory, gpu, cache_gib, weights_gib = self.memory, self.gpu, self.cache() / GIB, size_of(self.weights()) / GIB
        most = largest(lambda rows: replace(self, rows=rows).memory.safe_gib <= gpu.memory_gib, MOST_ROWS, self.rows)
        return {
            "way": self.way, "gpu": gpu.name, "fits": memory.verdict_on(gpu), "max_rows": most,
            "weights_gib": weights_gib, "cache_gib": cache_gib, "beside_gib": memory.peak_gib - weights_gib - cache_gib,
            "likely_gib": memory.peak_gib, "safe_gib": memory.safe_gib, "capacity_gib": gpu.memory_gib,
            "usd_per_hour": price and price.usd_per_hour, "price": price and price.said,
        }  # fmt: skip
