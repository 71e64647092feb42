"""Settings from the command line and from YAML files, read by TRL's parser of several dataclasses."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from trl import TrlParser

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.base.settings import GROUPS, RENAMED


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, as the rest does."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"error: {message}; --help lists the options\n")


class SettingsParser(OneSentenceParser, TrlParser):
    """TRL's parser: options from the fields of dataclasses, with dashes or underscores; `--config FILE` reads YAML."""

    def __init__(self, groups: Sequence[type], **kwargs: Any) -> None:
        """Take the dataclasses whose fields are options; the rest is argparse's."""
        super().__init__(
            dataclass_types=groups, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )
        self.add_argument(
            "--no_gradient_checkpointing", "--no-gradient-checkpointing", dest="gradient_checkpointing",
            action="store_false", default=None, help="Keep activations.",
        )  # fmt: skip

    def settings(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the value of every option, by its name.

        Raises:
            SystemExit: with code 2 for an option that is unknown, or a value of the wrong kind.
            BadInputError: the YAML file does not exist, or is no mapping of names and values.
        """
        try:
            *parsed, unknown = self.parse_args_and_config(arguments, return_remaining_strings=True)
        except BadInputError:
            raise
        except (OSError, IndexError, ValueError) as error:
            raise BadInputError(
                f"--config names no YAML file of settings ({error}): write `name: value` lines."
            ) from None
        if unknown:
            old = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
            now = (
                f"--{old} is called --{RENAMED[old]} now"
                if old in RENAMED
                else f"unrecognized arguments: {' '.join(unknown)}"
            )
            self.error(now)
        return {name: value for group in parsed for name, value in vars(group).items()}


def parse_overrides(defaults: RunConfig, arguments: Sequence[str] | None = None) -> RunConfig:
    """Return `defaults` with the settings of the command line, or of its YAML file, in place of its own.

    Those of `defaults` that mean nothing for the run any more, such as the rank of adapters with `--technique full`,
    fall to their defaults.

    Raises:
        SystemExit: with code 2 for an unknown field or a value of the wrong kind (argparse's own sentence).
        BadInputError: a value is out of range.
    """
    parser = SettingsParser(GROUPS, description="Settings of this run; --config FILE reads them from YAML.")
    parser.set_defaults(**defaults.to_dict())
    asked = parser.settings(arguments)
    return defaults.changed_to(**{name: value for name, value in asked.items() if value != getattr(defaults, name)})
