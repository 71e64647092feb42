"""The prefix of each line that a rank prints, such as `[RANK0:CPU]`."""

from common.base.print_prefix import prefixed_print, printing_with_prefix, rank_prefix

__all__ = ["prefixed_print", "printing_with_prefix", "rank_prefix"]
